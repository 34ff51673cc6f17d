//! Routing in one launch and in three.

use anyhow::Result;
use nvfp4_moe::routing::Routing;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::kernels::route::{self, Single};
use nvfp4_moe_device::params::{RouteParams, TokenCount};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{Bench, Lab, same};

struct Request {
    experts: usize,
    range: ExpertRange,
    topk: usize,
    /// Tokens for which the launch is made, and those that there are.
    bound: usize,
    tokens: usize,
    token_tile: u32,
    ids: Ids,
}

#[derive(Clone, Copy, Debug)]
enum Ids {
    /// Of all experts of the model, some of them -1, or far outside.
    Any,
    /// None is here.
    Elsewhere,
    /// All on the last expert here.
    Last,
}

fn requests() -> Vec<Request> {
    let request = |experts, first, count, topk, bound, tokens, token_tile, ids| Request {
        experts,
        range: ExpertRange { first, count },
        topk,
        bound,
        tokens,
        token_tile,
        ids,
    };
    // The last entry in each of a warp's groups of 32.
    let last_entries = (0..8).map(|group| request(3, 1, 2, 1, 32 * group + 5, 32 * group + 5, 8, Ids::Any));
    let others = [
        request(5, 1, 3, 3, 7, 7, 8, Ids::Any),
        request(1, 0, 1, 1, 1, 1, 16, Ids::Any),
        request(5, 2, 0, 2, 3, 3, 8, Ids::Any),
        request(40, 13, 19, 8, 255, 255, 8, Ids::Any),
        request(9, 2, 5, 2, 40, 29, 32, Ids::Any),
        request(6, 1, 4, 2, 33, 33, 8, Ids::Elsewhere),
        request(6, 1, 4, 2, 33, 33, 8, Ids::Last),
        // No token, though there could be some.
        request(9, 2, 5, 2, 40, 0, 32, Ids::Any),
        // A whole chunk, from expert 0 on.
        request(6, 0, 6, 2, 1024, 1024, 8, Ids::Any),
        // As many experts as several warps' lanes, but not as a multiple of four warps'.
        request(200, 10, 170, 4, 60, 55, 16, Ids::Any),
        // More experts than a block has threads.
        request(320, 7, 300, 8, 70, 70, 8, Ids::Any),
        // Blocks of `route_single` with others before and behind them, and blocks without tokens.
        request(9, 2, 5, 2, 4096, 4096, 16, Ids::Any),
        request(90, 3, 80, 6, 1000, 700, 16, Ids::Any),
        request(1000, 0, 1000, 2, 1500, 1500, 16, Ids::Any),
        // As many entries as `route_single` takes, and one more.
        request(9, 2, 5, 2, 16384, 16384, 16, Ids::Any),
        request(9, 2, 5, 1, 32769, 32769, 16, Ids::Any),
        // Several chunks, the last with one entry; a count on the device that is too large.
        request(70, 1, 65, 3, 1366, 9999, 64, Ids::Any),
        request(3, 1, 2, 2, 1024, 1024, 128, Ids::Any),
        request(3, 0, 2, 1, 7 * 2048, 7 * 2048, 128, Ids::Any),
        request(3, 0, 2, 1, 8 * 2048, 8 * 2048, 128, Ids::Any),
        // Many chunks, in every remainder of a sum over 16 at a time.
        request(3, 0, 2, 1, 31 * 2048 - 5, 31 * 2048 - 5, 128, Ids::Any),
        // The last chunk has no entry.
        request(300, 4, 290, 3, 1500, 600, 16, Ids::Any),
    ];
    others.into_iter().chain(last_entries).collect()
}

fn ids(request: &Request, rng: &mut StdRng) -> Vec<i32> {
    let (first, end) = (request.range.first as i32, request.range.end() as i32);
    let one = |rng: &mut StdRng| match request.ids {
        Ids::Any if rng.random_bool(0.05) => [-1, i32::MIN, i32::MAX, first - 1, end][rng.random_range(0..5)],
        Ids::Any => rng.random_range(0..request.experts as i32),
        Ids::Elsewhere => [-1, first - 1, end, end + 1][rng.random_range(0..4)],
        Ids::Last => end - 1,
    };
    (0..request.bound * request.topk).map(|_| one(rng)).collect()
}

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    for (index, request) in requests().iter().enumerate() {
        let ids = ids(request, &mut StdRng::seed_from_u64(index as u64));
        run(&bench, request, &ids, &["route_count", "route_scan", "route_place"], None)?;
        if let Some(single) = route::single(ids.len() as u32, request.range.count as u32) {
            run(&bench, request, &ids, &["route_single"], Some(single))?;
        }
    }
    Ok(())
}

/// Runs these kernels, with the usual threads and shared memory or these.
fn run(
    bench: &Bench<'_>,
    request: &Request,
    ids: &[i32],
    kernels: &[&'static str],
    single: Option<Single>,
) -> Result<()> {
    let Request { range, topk, bound, tokens, token_tile, .. } = *request;
    let entries = tokens.min(bound) * topk;
    let expected = Routing::new(&ids[..entries], topk, range);
    let chunks = ids.len().div_ceil(route::CHUNK_ENTRIES as usize);

    let device_tokens = bench.upload(&[tokens as u32])?;
    let topk_ids = bench.upload(ids)?;
    let chunk_counts = bench.room(chunks * range.count * 4)?;
    let [expert_offset, tile_offset] = [bench.room((range.count + 1) * 4)?, bench.room((range.count + 1) * 4)?];
    let slot_token = bench.room(expected.slots() * 4)?;
    let entry_slot = bench.room(entries * 4)?;
    let [amax_bits, claims] = [bench.room(8)?, bench.room(8)?];
    let params = RouteParams {
        tokens: TokenCount {
            device: if tokens == bound { 0 } else { device_tokens.address() },
            bound: bound as u32,
            padding: 0,
        },
        topk_ids: topk_ids.address(),
        chunk_counts: chunk_counts.address(),
        expert_offset: expert_offset.address(),
        tile_offset: tile_offset.address(),
        slot_token: slot_token.address(),
        entry_slot: entry_slot.address(),
        amax_bits: amax_bits.address(),
        claims: claims.address(),
        topk: topk as u32,
        first_expert: range.first as u32,
        experts: range.count as u32,
        chunks: chunks as u32,
        token_tile,
        unread: u32::from(tokens.is_multiple_of(2)),
    };
    let of_chunks = Single {
        blocks: chunks as u32,
        threads: route::THREADS,
        shared_bytes: route::shared_bytes(range.count as u32),
    };
    let Single { blocks, threads, shared_bytes } = single.unwrap_or(of_chunks);
    let launches: Vec<_> = kernels
        .iter()
        .map(|&kernel| Launch {
            kernel,
            grid: [if kernel == "route_scan" { 1 } else { blocks }, 1, 1],
            threads,
            shared_bytes,
            params: Params::Route(params),
        })
        .collect();
    // SAFETY: the kernels' threads, grids and shared memory; the buffers have the documented sizes.
    unsafe { bench.run(&launches)? };

    let what = |part: &str| format!("{part} of {kernels:?}, {entries} entries, topk {topk}, {range:?}");
    same(&expert_offset, &expected.expert_offset, &what("expert_offset"))?;
    same(&slot_token, &expected.slot_token, &what("slot_token"))?;
    same(&entry_slot, &expected.slot_of, &what("entry_slot"))?;
    same(&tile_offset, &tile_offsets(&expected.expert_offset, token_tile), &what("tile_offset"))?;
    same(&amax_bits, &[0u32; 2], &what("amax_bits"))?;
    same(&claims, &[0u32; 2], &what("claims"))
}

/// First token tile of each expert, and their number.
pub(super) fn tile_offsets(expert_offset: &[u32], token_tile: u32) -> Vec<u32> {
    let mut offsets = vec![0];
    for slots in expert_offset.windows(2) {
        offsets.push(offsets[offsets.len() - 1] + (slots[1] - slots[0]).div_ceil(token_tile));
    }
    offsets
}

//! Clusters of blocks: who is where (10.12 to 10.17), the cluster's barrier (9.7.13.3), shared memory, mbarriers and bulk copies
//! of other blocks.

use super::super::Check;
use super::{exact, of_sm_90a, scrambled};

const THREADS: u32 = 64;

/// A program of clusters. `%mine` and `%yours` are of the thread in the grid, `%r47` is the block's number in its cluster, `%r46`
/// that of the next one, the last one's next being the first.
fn clustered(name: &str, size: u32, blocks: u32, body: &str, inputs: Vec<u64>, expected: Vec<u64>) -> Check {
    let body = format!(
        "mov.u32 %r47, %ctaid.x; mul.wide.u32 %rd15, %r47, {}; add.u64 %yours, %yours, %rd15; add.u64 %mine, %mine, %rd15; \
         mov.u32 %r47, %cluster_ctarank; add.u32 %r46, %r47, 1; mov.u32 %r45, %cluster_nctarank; \
         rem.u32 %r46, %r46, %r45; {body}",
        8 * THREADS
    );
    let check = exact(name, 90, THREADS, &body, inputs, expected);
    let ptx = check.ptx.replace("args[24])\n{", &format!("args[24])\n.reqnctapercluster {size}\n{{"));
    Check { ptx, blocks, ..check }
}

/// What a thread gives, by its block and its index.
fn each_thread(blocks: u32, value: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    let threads = u64::from(THREADS);
    (0..u64::from(blocks) * threads).map(|i| value(i / threads, i % threads)).collect()
}

const NUMBER: &str = "shl.b32 %r2, %r45, 4; or.b32 %r1, %r47, %r2; mov.u32 %r2, %clusterid.x; shl.b32 %r2, %r2, 8; \
    or.b32 %r1, %r1, %r2; mov.u32 %r2, %nclusterid.x; shl.b32 %r2, %r2, 12; or.b32 %r1, %r1, %r2; \
    mov.u32 %r2, %cluster_ctaid.x; shl.b32 %r2, %r2, 16; or.b32 %r1, %r1, %r2; mov.u32 %r2, %cluster_nctaid.x; \
    shl.b32 %r2, %r2, 20; or.b32 %r1, %r1, %r2; mapa.shared::cluster.u32 %r3, %s, %r46; \
    getctarank.shared::cluster.u32 %r2, %r3; shl.b32 %r2, %r2, 24; or.b32 %r1, %r1, %r2; mov.u32 %r2, %clusterid.y; \
    or.b32 %r1, %r1, %r2; mov.u32 %r2, %cluster_ctaid.z; or.b32 %r1, %r1, %r2; cvt.u64.u32 %rd1, %r1; \
    st.global.b64 [%yours], %rd1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";

fn numbers(size: u32, blocks: u32) -> Check {
    let expected = each_thread(blocks, |block, _| {
        let (size, blocks) = (u64::from(size), u64::from(blocks));
        let rank = block % size;
        let (cluster, clusters, next) = (block / size, blocks / size, (rank + 1) % size);
        rank | size << 4 | cluster << 8 | clusters << 12 | rank << 16 | size << 20 | next << 24
    });
    let name = format!("mapa.shared::cluster.u32, getctarank.shared::cluster.u32, %cluster_ctarank of {size}");
    clustered(&name, size, blocks, NUMBER, vec![0], expected)
}

/// Each thread writes to the next block, and after the barrier reads what was written here and what it wrote there.
fn neighbours(size: u32, barrier: &str, map: &str, store: &str, load: &str, address: &str) -> Check {
    let blocks = 2 * size;
    let inputs = scrambled(u64::from(blocks * THREADS));
    let body = format!(
        "barrier.cluster.arrive; barrier.cluster.wait; mad.lo.u32 %r1, %t, 8, %s; ld.global.b64 %rd1, [%mine]; {map} \
         {store} [{address}], %rd1; {barrier} ld.shared.b64 %rd2, [%r1]; {load} %rd3, [{address}]; xor.b64 %rd2, %rd2, %rd3; \
         st.global.b64 [%yours], %rd2; barrier.cluster.arrive; barrier.cluster.wait;"
    );
    let threads = u64::from(THREADS);
    let expected = each_thread(blocks, |block, thread| {
        let (first, rank) = (block / u64::from(size) * u64::from(size), block % u64::from(size));
        let from = first + (rank + u64::from(size) - 1) % u64::from(size);
        inputs[(from * threads + thread) as usize] ^ inputs[(block * threads + thread) as usize]
    });
    let name =
        format!("{}, {store}, {load}", barrier.split("; ").collect::<Vec<_>>().join(", ").trim_end_matches([';', ' ']));
    clustered(&name, size, blocks, &body, inputs, expected)
}

fn memory() -> Vec<Check> {
    let narrow = "mapa.shared::cluster.u32 %r2, %r1, %r46;";
    let wide = "cvt.u64.u32 %rd4, %r1; cvta.shared.u64 %rd4, %rd4; mapa.u64 %rd5, %rd4, %r46;";
    let barriers = [
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;",
        "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
    ];
    let mut checks: Vec<_> = barriers
        .into_iter()
        .map(|barrier| neighbours(2, barrier, narrow, "st.shared::cluster.b64", "ld.shared::cluster.b64", "%r2"))
        .collect();
    checks.push(neighbours(4, barriers[0], narrow, "st.shared::cluster.u64", "ld.shared::cluster.u64", "%r2"));
    checks.push(neighbours(2, barriers[0], wide, "st.b64", "ld.b64", "%rd5"));
    // All threads of the cluster add to a word of the first block.
    let body = "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [%s], 0; barrier.cluster.arrive; barrier.cluster.wait; \
        mapa.shared::cluster.u32 %r1, %s, 0; add.u32 %r2, %t, %r47; red.shared::cluster.add.u32 [%r1], %r2; \
        barrier.cluster.arrive; barrier.cluster.wait; ld.shared::cluster.u32 %r3, [%r1]; cvt.u64.u32 %rd1, %r3; \
        st.global.b64 [%yours], %rd1; barrier.cluster.arrive; barrier.cluster.wait;";
    // 0 to 63 for each of two blocks, and 1 for each thread of the second.
    let expected = vec![2 * (63 * 64 / 2) + 64; 128];
    checks.push(clustered("red.shared::cluster.add.u32", 2, 2, body, vec![0], expected));
    checks
}

/// All threads of the cluster arrive at the first block's mbarrier; its threads wait and read what the others left.
fn arrivals(arrive: &str, count: u32) -> Check {
    let body = format!(
        "setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [%s], {count}; \
         @%p1 fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; \
         barrier.cluster.wait.acquire.aligned; ld.global.b64 %rd1, [%mine]; mad.lo.u32 %r1, %t, 8, %s; \
         mad.lo.u32 %r1, %r47, 512, %r1; mapa.shared::cluster.u32 %r2, %r1, 0; \
         st.shared::cluster.b64 [%r2+64], %rd1; mapa.shared::cluster.u32 %r3, %s, 0; cvt.u64.u32 %rd4, %s; \
         cvta.shared.u64 %rd4, %rd4; mapa.u64 %rd5, %rd4, 0; {arrive} setp.ne.u32 %p2, %r47, 0; mov.b64 %rd2, 0; @%p2 bra DONE; \
         WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%s], 0; @!%p3 bra WAIT; \
         mad.lo.u32 %r4, %t, 8, %s; ld.shared.b64 %rd2, [%r4+64]; ld.shared.b64 %rd3, [%r4+576]; xor.b64 %rd2, %rd2, %rd3; \
         DONE: st.global.b64 [%yours], %rd2; barrier.cluster.arrive; barrier.cluster.wait;"
    );
    let inputs = scrambled(128);
    let expected = each_thread(
        2,
        |block, thread| {
            if block == 0 { inputs[thread as usize] ^ inputs[64 + thread as usize] } else { 0 }
        },
    );
    let name = arrive.trim_end_matches(';').split(' ').next().unwrap_or_default();
    clustered(name, 2, 2, &body, inputs, expected)
}

const BEGIN: &str = "setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [%s], 1; \
    @%p1 fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; \
    add.u32 %r1, %s, 128; mad.lo.u32 %r2, %t, 8, %r1;";
const WAIT: &str = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%s], 0; @!%p3 bra WAIT; ld.shared.b64 %rd2, [%r2]; \
    st.global.b64 [%yours], %rd2; barrier.cluster.arrive; barrier.cluster.wait;";

/// Each block of `size` copies its part of 512 bytes to the blocks of the mask, all of which expect all parts.
fn multicast(size: u32, hint: bool) -> Check {
    let part = 512 / size;
    let mask = (1 << size) - 1;
    let (suffix, policy) = if hint { (".L2::cache_hint", ", %rd9") } else { ("", "") };
    let name = format!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster{suffix}");
    let body = format!(
        "{BEGIN} @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 512; mov.b16 %h1, {mask}; \
         mov.b64 %rd9, 0x12F0000000000000; mul.wide.u32 %rd1, %r47, {part}; add.u64 %rd1, %rd1, %in; \
         mad.lo.u32 %r1, %r47, {part}, %r1; {name} [%r1], [%rd1], {part}, [%s], %h1{policy}; {WAIT}"
    );
    let inputs = scrambled(64);
    let expected = each_thread(size, |_, thread| inputs[thread as usize]);
    of_sm_90a(clustered(&format!("{name} of {size}"), size, size, &body, inputs, expected))
}

/// To one other block: with a mask, by its address, and from shared memory.
fn one_way() -> Vec<Check> {
    let inputs = scrambled(128);
    let at = |block: u64, thread: u64| inputs[(64 * block + thread) as usize];
    let masked = format!(
        "{BEGIN} @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 512; shl.b32 %r5, 1, %r46; \
         cvt.u16.u32 %h1, %r5; \
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%mine], 512, [%s], %h1; \
         {WAIT}"
    )
    .replace("shl.b32 %r5, 1, %r46", "mov.u32 %r5, 1; shl.b32 %r5, %r5, %r46");
    let by_address = format!(
        "{BEGIN} @!%p1 bra WAIT; mapa.shared::cluster.u32 %r3, %r1, %r46; mapa.shared::cluster.u32 %r4, %s, %r46; \
         mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r4], 512; \
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%mine], 512, [%r4]; {WAIT}"
    );
    let from_shared = format!(
        "{BEGIN} ld.global.b64 %rd1, [%mine]; st.shared.b64 [%r2+512], %rd1; fence.proxy.async; bar.sync 0; \
         @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 512; mapa.shared::cluster.u32 %r3, %r1, %r46; \
         mapa.shared::cluster.u32 %r4, %s, %r46; add.u32 %r5, %r1, 512; \
         cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3], [%r5], 512, [%r4]; {WAIT}"
    );
    [
        ("cp.async.bulk.multicast::cluster to one", masked),
        ("cp.async.bulk.shared::cluster.global to another block", by_address),
        ("cp.async.bulk.shared::cluster.shared::cta", from_shared),
    ]
    .into_iter()
    .map(|(name, body)| {
        clustered(name, 2, 2, &body, inputs.clone(), each_thread(2, |block, thread| at(1 - block, thread)))
    })
    .collect()
}

pub(super) fn checks() -> Vec<Check> {
    let mut checks = vec![numbers(2, 6), numbers(4, 8), numbers(1, 2)];
    checks.extend(memory());
    for (arrive, count) in [
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];", 128),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r3];", 128),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3], 2;", 256),
        ("mbarrier.arrive.release.cluster.b64 _, [%rd5];", 128),
        ("mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [%r3];", 128),
    ] {
        checks.push(arrivals(arrive, count));
    }
    checks.extend([multicast(2, false), multicast(4, false), multicast(2, true)]);
    checks.extend(one_way());
    checks
}

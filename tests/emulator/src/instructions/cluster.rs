//! Clusters of blocks: their barrier (PTX ISA 9.7.13.3 `barrier.cluster`) and addresses in each other's shared memory (9.7.9.23
//! `mapa`, 9.7.9.24 `getctarank`).

use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::{Context, Execute, Fault, Reg, Step, each, fault};
use crate::memory::SHARED_WINDOW;
use crate::memory::shared::BLOCK_SHIFT;
use crate::types::Type;

/// `barrier.cluster.arrive` and `barrier.cluster.wait` (9.7.13.3).
struct ClusterBarrier {
    wait: bool,
    aligned: bool,
    /// Orders memory.
    releases: bool,
}

impl Execute for ClusterBarrier {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        // All threads of the warp come together either way.
        let Some(lanes) = cx.converge(lanes, cx.warp.live, self.aligned)? else { return Ok(Step::Hold) };
        if self.wait {
            return cx.wait_at_cluster(lanes);
        }
        // Without an order of its own it has that of a fence before it.
        let releasing = if self.releases { lanes } else { lanes & cx.warp.state.fenced };
        cx.warp.state.fenced &= !lanes;
        cx.arrive_at_cluster(lanes, releasing)?;
        Ok(Step::Next)
    }
}

/// `mapa` (9.7.9.23): the same address in another block.
struct MapAddress {
    d: Reg,
    a: Reg,
    rank: Reg,
    generic: bool,
}

impl Execute for MapAddress {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (addresses, ranks) = (cx.read(self.a, lanes)?, cx.read(self.rank, lanes)?);
        let mut mapped = [0; 32];
        for lane in each(lanes) {
            if ranks[lane] >= u64::from(cx.cluster.size) {
                let detail = format!("block {} of a cluster of {}", ranks[lane], cx.cluster.size);
                return Err(fault(FindingKind::Operand, 1 << lane, detail));
            }
            let window = if self.generic { SHARED_WINDOW } else { 0 };
            let inner = addresses[lane].wrapping_sub(window) & ((1 << BLOCK_SHIFT) - 1);
            mapped[lane] = window + (inner | (ranks[lane] + 1) << BLOCK_SHIFT);
        }
        cx.write(self.d, lanes, &mapped);
        Ok(Step::Next)
    }
}

/// `getctarank` (9.7.9.24): the block that an address is in.
struct RankOfAddress {
    d: Reg,
    a: Reg,
}

impl Execute for RankOfAddress {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let addresses = cx.read(self.a, lanes)?;
        let mut ranks = [0; 32];
        for lane in each(lanes) {
            ranks[lane] = u64::from(cx.shared_or_generic(addresses[lane], lane)? >> BLOCK_SHIFT);
        }
        cx.write(self.d, lanes, &ranks);
        Ok(Step::Next)
    }
}

fn barrier(s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.need("cluster")?;
    let wait = s.modifiers.one_of(&[("arrive", false), ("wait", true)]).ok_or("without .arrive or .wait")?;
    let order = if wait {
        s.modifiers.one_of(&[("acquire", true)])
    } else {
        s.modifiers.one_of(&[("release", true), ("relaxed", false)])
    };
    Ok(Box::new(ClusterBarrier { wait, aligned: s.modifiers.take("aligned"), releases: order.unwrap_or(true) }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    match s.name {
        "barrier" if s.modifiers.has("cluster") => return barrier(s).map(Some),
        "mapa" | "getctarank" => {}
        _ => return Ok(None),
    }
    let generic = !s.modifiers.take("shared::cluster");
    let kind = s.modifiers.kind()?;
    if !matches!(kind, Type::U32 | Type::U64) || generic && kind == Type::U32 {
        return Err("its type".into());
    }
    let a = d.source(s, 1, kind)?;
    if s.name == "getctarank" {
        return Ok(Some(Box::new(RankOfAddress { d: d.destination(s, 0, Type::U32)?, a })));
    }
    Ok(Some(Box::new(MapAddress { d: d.destination(s, 0, kind)?, a, rank: d.source(s, 2, Type::U32)?, generic })))
}

//! Barriers of blocks (PTX ISA 9.7.13.1) and warps (9.7.13.2), of grids (9.7.13.13), and fences (9.7.13.4).

use super::memory::{Scope, take_scope};
use super::{Decoder, Operation, Refusal, Statement};
use crate::execute::{Condition, Context, Execute, Fault, Pred, Reg, Step};
use crate::memory::block_clocks::Order;
use crate::types::Type;

/// Reductions of a block that are under way.
#[derive(Default)]
pub(crate) struct Reductions {
    /// Who waits for one, at which barrier.
    waiting: Vec<Waiter>,
    /// Of each barrier: threads that arrived, and those whose predicate held.
    counts: [(u32, u32); 16],
}

struct Waiter {
    barrier: u64,
    warp: u32,
    lanes: u32,
    /// Threads and those whose predicate held, once all have arrived.
    result: Option<(u32, u32)>,
}

/// Where a reduction's result goes.
#[derive(Clone, Copy)]
enum Reduced {
    Count(Reg),
    All(Pred),
    Any(Pred),
}

/// `bar.red`, `barrier.red` (9.7.13.1) and their `.cta` forms. Lanes that wait execute the instruction again for the result.
struct Reduction {
    barrier: BlockBarrier,
    condition: Condition,
    reduced: Reduced,
}

impl Reduction {
    fn write(&self, cx: &mut Context<'_>, lanes: u32, (threads, held): (u32, u32)) {
        let predicate = |holds| if holds { lanes } else { 0 };
        match self.reduced {
            Reduced::Count(register) => cx.write(register, lanes, &[u64::from(held); 32]),
            Reduced::All(register) => cx.write_predicate(register, lanes, predicate(held == threads)),
            Reduced::Any(register) => cx.write_predicate(register, lanes, predicate(held != 0)),
        }
    }
}

impl Execute for Reduction {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let warp = cx.warp.index;
        let waiting = &mut cx.block.extra.reductions.waiting;
        if waiting.iter().any(|waiter| waiter.warp == warp && waiter.lanes & lanes != 0) {
            if waiting.iter().any(|w| w.warp == warp && w.lanes & lanes != 0 && w.result.is_none()) {
                return Ok(Step::Hold);
            }
            let (mine, others) = std::mem::take(waiting)
                .into_iter()
                .partition(|waiter| waiter.warp == warp && waiter.lanes & lanes != 0);
            *waiting = others;
            let mine: Vec<Waiter> = mine;
            for waiter in mine {
                self.write(cx, waiter.lanes, waiter.result.unwrap_or_default());
            }
            return Ok(Step::Next);
        }
        let lanes = match self.barrier.aligned {
            false => lanes,
            true => match cx.converge_all(lanes)? {
                Some(together) => together,
                None => return Ok(Step::Hold),
            },
        };
        let id = cx.uniform(self.barrier.id, lanes)?;
        let held = cx.holds(self.condition, lanes)?.count_ones();
        let step = self.barrier.execute(cx, lanes)?;
        let reductions = &mut cx.block.extra.reductions;
        let arrived = |counts: (u32, u32)| (counts.0 + lanes.count_ones(), counts.1 + held);
        match step {
            Step::Next => {
                let result = arrived(std::mem::take(&mut reductions.counts[id as usize]));
                reductions
                    .waiting
                    .iter_mut()
                    .filter(|waiter| waiter.barrier == id && waiter.result.is_none())
                    .for_each(|waiter| waiter.result = Some(result));
                self.write(cx, lanes, result);
                Ok(Step::Next)
            }
            Step::Sleep(lanes) => {
                reductions.counts[id as usize] = arrived(reductions.counts[id as usize]);
                reductions.waiting.push(Waiter { barrier: id, warp, lanes, result: None });
                Ok(Step::Hold)
            }
            other => Ok(other),
        }
    }
}

/// `bar.sync`, `bar.arrive`, `barrier.sync`, `barrier.arrive` (9.7.13.1) and their `.cta` forms.
struct BlockBarrier {
    id: Reg,
    count: Option<Reg>,
    wait: bool,
    aligned: bool,
}

impl Execute for BlockBarrier {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if self.aligned {
            match cx.converge_all(lanes)? {
                Some(together) if together == lanes => {}
                // The running lanes became more: all of them execute the instruction now.
                Some(together) => return self.execute(cx, together),
                None => return Ok(Step::Hold),
            }
        }
        let id = cx.uniform(self.id, lanes)?;
        let count = match self.count {
            Some(count) => cx.uniform(count, lanes)? as u32,
            None => cx.block.threads,
        };
        cx.arrive(id, count, lanes, self.wait)
    }
}

/// `bar.warp.sync` (9.7.13.2).
struct WarpBarrier {
    members: Reg,
}

impl Execute for WarpBarrier {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let members = cx.mask(self.members, lanes)?;
        match cx.converge(lanes, members, false)? {
            Some(lanes) => cx.cluster.shared.sync_warp(cx.warp.index, lanes),
            None => return Ok(Step::Hold),
        }
        Ok(Step::Next)
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `membar`, `fence` (9.7.13.4): accesses here are performed at once, so what is left is who may know of them.
struct Fence {
    proxy: bool,
    /// Between blocks.
    order: Order,
}

impl Execute for Fence {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        cx.warp.state.fenced |= lanes;
        if cx.launch.releases.is_some() {
            cx.warp.state.global_fences.fence(lanes, self.order, &mut cx.block.clock);
        }
        if self.proxy {
            cx.cluster.shared.proxy_fence(cx.warp.index, lanes);
        }
        Ok(Step::Next)
    }
}

fn block_barrier(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.take("cta");
    let aligned = s.name == "bar" || s.modifiers.take("aligned");
    if s.modifiers.take("red") {
        return reduction(d, s, aligned);
    }
    let forms = [("sync", true), ("arrive", false)];
    let wait = s.modifiers.one_of(&forms).ok_or("without .sync, .arrive or .red")?;
    let id = d.source(s, 0, Type::U32)?;
    let count = if s.count() > 1 { Some(d.source(s, 1, Type::U32)?) } else { None };
    if !wait && count.is_none() {
        return Err("an arrival without a thread count".into());
    }
    Ok(Box::new(BlockBarrier { id, count, wait, aligned }))
}

fn reduction(d: &mut Decoder, s: &mut Statement<'_>, aligned: bool) -> Result<Operation, Refusal> {
    let reduced = if s.modifiers.take("popc") {
        s.modifiers.need("u32")?;
        Reduced::Count(d.destination(s, 0, Type::U32)?)
    } else {
        let all = s.modifiers.one_of(&[("and", true), ("or", false)]).ok_or("without .popc, .and or .or")?;
        s.modifiers.need("pred")?;
        let p = d.predicate_destination(s, 0)?.ok_or("operand form")?;
        if all { Reduced::All(p) } else { Reduced::Any(p) }
    };
    let id = d.source(s, 1, Type::U32)?;
    let count = if s.count() > 3 { Some(d.source(s, 2, Type::U32)?) } else { None };
    let condition = d.predicate_source(s, s.count() - 1)?;
    Ok(Box::new(Reduction { barrier: BlockBarrier { id, count, wait: true, aligned }, condition, reduced }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "bar" if s.modifiers.take("warp") => {
            s.modifiers.need("sync")?;
            Box::new(WarpBarrier { members: d.source(s, 0, Type::B32)? })
        }
        "bar" | "barrier" => block_barrier(d, s)?,
        "griddepcontrol" => {
            // Grids run one after the other, each to its end.
            s.modifiers.one_of(&[("launch_dependents", ()), ("wait", ())]).ok_or("its action")?;
            Box::new(Fence { proxy: false, order: Order::RELAXED })
        }
        "membar" => {
            let levels = [("cta", "relaxed"), ("gl", "sc"), ("sys", "sc")];
            let order = Order::named(s.modifiers.one_of(&levels).ok_or("its level")?);
            d.note_order(order);
            Box::new(Fence { proxy: false, order })
        }
        "fence" => {
            if s.modifiers.take("proxy") {
                s.modifiers.need("async")?;
                // The async proxy of one state space, or of all.
                s.modifiers.one_of(&[("shared::cta", ()), ("shared::cluster", ()), ("global", ())]);
                Box::new(Fence { proxy: true, order: Order::RELAXED })
            } else {
                let sems = ["sc", "acq_rel", "acquire", "release"].map(|sem| (sem, sem));
                let sem = s.modifiers.one_of(&sems).unwrap_or("acq_rel");
                let proxy = s.modifiers.take("mbarrier_init");
                let order = match take_scope(s) {
                    Scope::Device if !proxy => Order::named(sem),
                    _ => Order::RELAXED,
                };
                d.note_order(order);
                // The async proxy signals mbarriers: it must see their initialization.
                Box::new(Fence { proxy, order })
            }
        }
        _ => return Ok(None),
    }))
}

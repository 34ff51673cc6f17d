//! Barriers of blocks and warps (PTX ISA 9.7.13.1, 9.7.13.2) and fences (9.7.13.4).

use super::{Decoder, Operation, Refusal, Statement};
use crate::execute::{Context, Execute, Fault, Reg, Step};
use crate::types::Type;

/// `bar.sync`, `bar.arrive`, `barrier.sync`, `barrier.arrive` and their `.cta` forms.
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

/// `bar.warp.sync`.
struct WarpBarrier {
    members: Reg,
}

impl Execute for WarpBarrier {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let members = cx.mask(self.members, lanes)?;
        match cx.converge(lanes, members, false)? {
            Some(lanes) => cx.block.shared.sync_warp(cx.warp.index, lanes),
            None => return Ok(Step::Hold),
        }
        Ok(Step::Next)
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `membar`, `fence`: accesses here are performed at once, so only the proxy fence does something.
struct Fence {
    proxy: bool,
}

impl Execute for Fence {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if self.proxy {
            cx.block.shared.proxy_fence(cx.warp.index, lanes);
        }
        Ok(Step::Next)
    }
}

fn block_barrier(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.take("cta");
    let aligned = s.name == "bar" || s.modifiers.take("aligned");
    let wait = s.modifiers.one_of(&[("sync", true), ("arrive", false)]).ok_or("without .sync or .arrive")?;
    let id = d.source(s, 0, Type::U32)?;
    let count = if s.count() > 1 { Some(d.source(s, 1, Type::U32)?) } else { None };
    if !wait && count.is_none() {
        return Err("an arrival without a thread count".into());
    }
    Ok(Box::new(BlockBarrier { id, count, wait, aligned }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "bar" if s.modifiers.take("warp") => {
            s.modifiers.need("sync")?;
            Box::new(WarpBarrier { members: d.source(s, 0, Type::B32)? })
        }
        "bar" | "barrier" => block_barrier(d, s)?,
        "membar" => {
            s.modifiers.one_of(&[("cta", ()), ("gl", ()), ("sys", ())]).ok_or("its level")?;
            Box::new(Fence { proxy: false })
        }
        "fence" => {
            if s.modifiers.take("proxy") {
                s.modifiers.need("async")?;
                // The async proxy of one state space, or of all.
                s.modifiers.one_of(&[("shared::cta", ()), ("shared::cluster", ()), ("global", ())]);
                Box::new(Fence { proxy: true })
            } else {
                s.modifiers.one_of(&[("sc", ()), ("acq_rel", ()), ("acquire", ()), ("release", ())]);
                let proxy = s.modifiers.take("mbarrier_init");
                super::memory::take_scope(s);
                // The async proxy signals mbarriers: it must see their initialization.
                Box::new(Fence { proxy })
            }
        }
        _ => return Ok(None),
    }))
}

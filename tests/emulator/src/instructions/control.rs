//! Control flow (PTX ISA 9.7.12).

use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::{Context, Execute, Fault, Step, fault};

/// `bra{.uni}` (9.7.12.3).
struct Branch {
    target: u32,
    uniform: bool,
}

impl Execute for Branch {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if self.uniform && lanes != cx.warp.active {
            let detail = format!("of the lanes {:#010x} only {lanes:#010x} take bra.uni", cx.warp.active);
            return Err(fault(FindingKind::Divergent, lanes, detail));
        }
        Ok(Step::Jump { taken: lanes, target: self.target })
    }
}

/// `ret` of a kernel and `exit` (9.7.12.6, 9.7.12.7).
struct Exit;

impl Execute for Exit {
    fn execute(&self, _: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        Ok(Step::Exit(lanes))
    }
}

/// `trap` (9.7.19.4).
struct Trap;

impl Execute for Trap {
    fn execute(&self, _: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        Err(fault(FindingKind::Trap, lanes, ""))
    }
}

/// `nanosleep` (9.7.19.2) and other hints to let others run.
struct Pause;

impl Execute for Pause {
    fn execute(&self, _: &mut Context<'_>, _: u32) -> Result<Step, Fault> {
        Ok(Step::Yield)
    }
}

/// A jump of the layout.
pub(crate) fn jump(target: u32) -> Operation {
    Box::new(Branch { target, uniform: false })
}

/// The end of a body without `ret`.
pub(crate) fn end() -> Operation {
    Box::new(Exit)
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "bra" => {
            let uniform = s.modifiers.take("uni");
            Box::new(Branch { target: d.label(s, 0)?, uniform })
        }
        "ret" => {
            s.modifiers.take("uni");
            Box::new(Exit)
        }
        "exit" => Box::new(Exit),
        "trap" => Box::new(Trap),
        "nanosleep" => {
            s.modifiers.need("u32")?;
            d.source(s, 0, crate::types::Type::U32)?;
            Box::new(Pause)
        }
        _ => return Ok(None),
    }))
}

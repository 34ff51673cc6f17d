//! Registers that asynchronous matrix products (`wgmma`) read and write, and who else touches them.
//!
//! Products of a warp are numbered. A register knows the last product that uses it, as what, and behind which
//! `wgmma.fence` the program last touched it itself.

use std::cell::Cell;
use std::collections::VecDeque;

use super::{Context, Fault, Reg, fault};
use crate::error::FindingKind;

/// What a product uses a register as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// A row of A.
    #[default]
    Multiplicand,
    /// An accumulator of a product with so many columns.
    Accumulator(u16),
}

#[derive(Clone, Default)]
struct Use {
    /// Number of the first fence after the program's last access.
    touched: Cell<u32>,
    /// Number of the last product that uses it, and of the last fence before that.
    product: u32,
    fence: u32,
    role: Role,
}

/// Products that were committed together.
struct Group {
    /// Number of the last one.
    product: u32,
    time: u32,
}

/// Use of a warp's registers by its products.
#[derive(Default)]
pub(crate) struct AsyncRegisters {
    /// Of each register; empty where the kernel has no such products.
    uses: Vec<Use>,
    fences: u32,
    /// Products that were begun, committed, and waited for.
    begun: u32,
    committed: u32,
    done: u32,
    /// When the last product began, in the block's clock.
    time: u32,
    groups: VecDeque<Group>,
    /// A write to a register that is in use.
    violation: Option<(Reg, u32)>,
}

impl AsyncRegisters {
    /// For so many registers of a kernel with such products; none for other kernels.
    pub(crate) fn new(registers: usize) -> Self {
        Self { uses: vec![Use::default(); registers], ..Self::default() }
    }

    /// The program touches a register; false if a product uses it.
    #[inline(always)]
    pub(crate) fn touch(&self, register: Reg) -> bool {
        match self.uses.get(register.0 as usize) {
            None => true,
            Some(used) => {
                used.touched.set(self.fences + 1);
                used.product <= self.done
            }
        }
    }

    /// The program writes a register.
    #[inline(always)]
    pub(crate) fn touch_to_write(&mut self, register: Reg, lanes: u32) {
        if !self.touch(register) {
            self.violation = Some((register, lanes));
        }
    }

    /// A write to a register in use since the last call.
    #[inline(always)]
    pub(crate) fn violation(&mut self) -> Option<(Reg, u32)> {
        if self.uses.is_empty() { None } else { self.violation.take() }
    }

    /// Why a register in use is.
    fn state(&self, register: Reg) -> &'static str {
        let product = self.uses[register.0 as usize].product;
        if product > self.committed { "was not committed" } else { "was committed but not waited for" }
    }

    /// `wgmma.fence`
    pub(crate) fn fence(&mut self) {
        self.fences += 1;
    }

    /// A product begins at a time of the block's clock.
    pub(crate) fn begin(&mut self, time: u32) {
        self.begun += 1;
        self.time = time;
    }

    /// The product that has begun last uses a register.
    pub(crate) fn hold(&mut self, register: Reg, role: Role) {
        let (product, fence) = (self.begun, self.fences);
        let used = &mut self.uses[register.0 as usize];
        (used.product, used.fence, used.role) = (product, fence, role);
    }

    /// `wgmma.commit_group`
    pub(crate) fn commit(&mut self) {
        self.committed = self.begun;
        self.groups.push_back(Group { product: self.begun, time: self.time });
    }

    /// `wgmma.wait_group`: the time up to which products are done, if that is news.
    pub(crate) fn wait(&mut self, pending: usize) -> Option<u32> {
        let mut time = None;
        while self.groups.len() > pending {
            let group = self.groups.pop_front()?;
            if group.product > self.done {
                self.done = group.product;
                time = Some(group.time);
            }
        }
        time
    }
}

impl Context<'_> {
    /// A fault for touching a register that a product uses.
    #[cold]
    pub(super) fn register_in_flight(&self, register: Reg, lanes: u32) -> Fault {
        let name = self.launch.kernel.register_name(register);
        let state = self.warp.products.state(register);
        let detail = format!("register {name}; the wgmma that uses it {state}");
        fault(FindingKind::RegisterInFlight, lanes, detail)
    }

    /// Checks that a product may use a register: no other use of it is under way, and it was fenced since the program touched
    /// it. Accumulators of consecutive products of one shape need neither.
    pub(crate) fn check_product_register(&self, register: Reg, role: Role) -> Result<(), Fault> {
        let products = &self.warp.products;
        let used = &products.uses[register.0 as usize];
        let missing = |why: &str| {
            let detail = format!("register {}: {why}", self.launch.kernel.register_name(register));
            Err(fault(FindingKind::RegisterFence, u32::MAX, detail))
        };
        if used.product > products.done && used.role != role {
            return Err(self.register_in_flight(register, u32::MAX));
        }
        if used.touched.get() > products.fences {
            return missing("the program touched it after the last one");
        }
        if products.fences == 0 {
            return missing("there was none before the first product");
        }
        if used.product != 0 && used.fence == products.fences && used.role != role {
            return missing("a product of another shape used it");
        }
        Ok(())
    }
}

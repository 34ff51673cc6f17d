//! Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.12: `ld`, `ld.global.nc`, `ldu`, `st`).

use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::execute::access::Space;
use crate::execute::{Context, Execute, Fault, Reg, Step, each};
use crate::memory::block_clocks::Order;
use crate::memory::global_races::Access;
use crate::memory::{AccessBytes, MAX_ACCESS};
use crate::types::{Type, sign_extend, truncate};

/// The last strong load, or atomic with a result, of a warp.
#[derive(Default)]
pub(crate) struct Poll {
    pub(crate) pc: u32,
    pub(crate) lane: u32,
    pub(crate) address: u64,
    value: u64,
    /// Nothing has changed since the one before, in this turn of the warp.
    pub(crate) repeated: bool,
}

impl Context<'_> {
    /// After a strong access of some lanes, the last of them at an address: others run first if it found there what it had found
    /// the last time.
    pub(super) fn poll(&mut self, lanes: u32, address: u64, register: Reg) -> Step {
        let lane = 31 - lanes.leading_zeros();
        let (pc, value) = (self.warp.pc, self.warp.registers[register.0 as usize][lane as usize]);
        let last = &mut self.warp.state.poll;
        let repeated = (last.pc, last.address, last.value) == (pc, address, value);
        *last = Poll { pc, lane, address, value, repeated };
        if !repeated {
            return Step::Next;
        }
        self.cluster.mbarriers.allow_waiting();
        Step::Yield
    }
}

/// `ld`, `ld.global.nc`, `ldu` (9.7.9.8 to 9.7.9.10).
struct Load {
    space: Space,
    address: Source,
    /// Element type, destinations and their widths.
    kind: Type,
    destinations: Vec<(Option<Reg>, u32)>,
    access: Access,
}

impl Load {
    #[inline(always)]
    fn element(&self, wide: u64, width: u32) -> u64 {
        let bits = self.kind.bits();
        if self.kind.is_signed() { truncate(sign_extend(wide, bits) as u64, width) } else { truncate(wide, bits) }
    }

    /// All lanes, of `N` bytes each: with their number known the copies are single moves.
    fn run<const N: usize>(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let bases = cx.read(self.address.base, lanes)?;
        let size = self.kind.bytes();
        let mut last = 0;
        for lane in each(lanes) {
            // Room to read 8 bytes from the last element on.
            let mut bytes = [0; MAX_ACCESS + 8];
            let address = self.address.address(bases[lane]);
            last = address;
            cx.load(self.space, lane, address, &mut bytes[..N], self.access)?;
            for (i, &(register, width)) in self.destinations.iter().enumerate() {
                if let Some(register) = register {
                    let wide: [u8; 8] = bytes[i * size..i * size + 8].try_into().expect("8 bytes");
                    cx.warp.registers[register.0 as usize][lane] = self.element(u64::from_le_bytes(wide), width);
                }
            }
        }
        for register in self.destinations.iter().filter_map(|&(register, _)| register) {
            cx.warp.written[register.0 as usize] |= lanes;
            cx.warp.products.touch_to_write(register, lanes);
        }
        match (self.access, self.destinations[0].0) {
            (Access::Strong(_), Some(register)) => Ok(cx.poll(lanes, last, register)),
            _ => Ok(Step::Next),
        }
    }
}

impl Execute for Load {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        match self.kind.bytes() * self.destinations.len() {
            1 => self.run::<1>(cx, lanes),
            2 => self.run::<2>(cx, lanes),
            4 => self.run::<4>(cx, lanes),
            8 => self.run::<8>(cx, lanes),
            16 => self.run::<16>(cx, lanes),
            _ => self.run::<MAX_ACCESS>(cx, lanes),
        }
    }
}

/// `st` (9.7.9.11).
struct Store {
    space: Space,
    address: Source,
    kind: Type,
    sources: Vec<Reg>,
    access: Access,
}

impl Execute for Store {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let bases = cx.read(self.address.base, lanes)?;
        let size = self.kind.bytes();
        let mut bytes: [AccessBytes; 32] = [[0; MAX_ACCESS]; 32];
        for (i, &source) in self.sources.iter().enumerate() {
            let values = cx.read(source, lanes)?;
            for lane in each(lanes) {
                bytes[lane][i * size..(i + 1) * size].copy_from_slice(&values[lane].to_le_bytes()[..size]);
            }
        }
        let total = size * self.sources.len();
        for lane in each(lanes) {
            cx.store(self.space, lane, self.address.address(bases[lane]), &bytes[lane][..total], self.access)?;
        }
        Ok(Step::Next)
    }
}

/// Takes the state space; generic where there is none.
pub(super) fn space(s: &mut Statement<'_>) -> Space {
    let spaces = [
        ("global", Space::Global),
        ("const", Space::Global),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("shared::cluster", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Param),
        ("param::entry", Space::Param),
    ];
    s.modifiers.one_of(&spaces).unwrap_or(Space::Generic)
}

/// Takes what says how the access is ordered, and hints that change nothing here.
fn order(s: &mut Statement<'_>, plain: Access) -> Access {
    s.modifiers.take("weak");
    let sem = ["volatile", "relaxed", "acquire", "release"].into_iter().find(|name| s.modifiers.take(name));
    let scope = take_scope(s);
    for hint in ["ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc"] {
        s.modifiers.take(hint);
    }
    for hint in ["L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"] {
        s.modifiers.take(hint);
    }
    for hint in ["L2::64B", "L2::128B", "L2::256B"] {
        s.modifiers.take(hint);
    }
    sem.map_or(plain, |sem| ordered(sem, scope, plain))
}

/// For whom an access or a fence is strong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Block,
    Cluster,
    /// All blocks: the GPU or more.
    Device,
}

/// Takes a scope; that of the GPU where there is none.
pub(super) fn take_scope(s: &mut Statement<'_>) -> Scope {
    let scopes = [("cta", Scope::Block), ("cluster", Scope::Cluster), ("gpu", Scope::Device), ("sys", Scope::Device)];
    s.modifiers.one_of(&scopes).unwrap_or(Scope::Device)
}

/// How an access of an order and a scope takes part in races between blocks: as a plain one, if it is strong for its own block
/// only.
pub(super) fn ordered(sem: &str, scope: Scope, plain: Access) -> Access {
    match scope {
        Scope::Block => plain,
        Scope::Cluster => Access::Strong(Order::RELAXED),
        Scope::Device => Access::Strong(Order::named(sem)),
    }
}

/// Takes `.v2`, `.v4`, `.v8`.
fn elements(s: &mut Statement<'_>, kind: Type, count: usize) -> Result<(), Refusal> {
    let vector = s.modifiers.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
    if vector != count {
        return Err(format!("{count} registers for {vector} elements").into());
    }
    if kind.bytes() * count > MAX_ACCESS || kind.bytes() > 8 {
        return Err(format!("{} bytes at once", kind.bytes() * count).into());
    }
    Ok(())
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    match s.name {
        "ld" | "ldu" => {
            let space = space(s);
            let access = order(s, Access::Read);
            let kind = s.modifiers.kind()?;
            let registers = d.destinations(s, 0, kind, true)?;
            elements(s, kind, registers.len())?;
            let width = |register: Reg| if kind.bits() == d.width(register) { kind.bits() } else { d.width(register) };
            let widths: Vec<_> = registers.iter().map(|register| register.map_or(0, width)).collect();
            let destinations = registers.into_iter().zip(widths).collect();
            Ok(Some(Box::new(Load { space, address: d.address(s, 1)?, kind, destinations, access })))
        }
        "st" => {
            let space = space(s);
            let access = order(s, Access::Write);
            let kind = s.modifiers.kind()?;
            let sources = d.sources(s, 1, kind, true)?;
            elements(s, kind, sources.len())?;
            d.note_store(kind.bytes() * sources.len());
            d.note_access(access);
            Ok(Some(Box::new(Store { space, address: d.address(s, 0)?, kind, sources, access })))
        }
        _ => Ok(None),
    }
}

//! Loads and stores of one lane, in any state space.

use super::{Context, Fault, fault_at};
use crate::error::FindingKind;
use crate::memory::block_clocks::{Order, Records, Update, Word};
use crate::memory::global_races::Access;
use crate::memory::shared::SharedFault;
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, Place, SHARED_WINDOW, WINDOW_BYTES};

/// A state space of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Decided by the address.
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

impl Space {
    /// The space of an address and the address inside of it.
    pub(crate) fn resolve(self, address: u64) -> (Self, u64) {
        if self != Self::Generic {
            return (self, address);
        }
        for (window, space) in [(SHARED_WINDOW, Self::Shared), (LOCAL_WINDOW, Self::Local), (PARAM_WINDOW, Self::Param)]
        {
            if address.wrapping_sub(window) < WINDOW_BYTES {
                return (space, address - window);
            }
        }
        (Self::Global, address)
    }
}

pub(crate) fn shared_fault(fault: SharedFault, lane: usize, address: u64) -> Fault {
    let kind = match fault {
        SharedFault::OutOfBounds => FindingKind::OutOfBounds,
        SharedFault::Unwritten(_) => FindingKind::UnwrittenMemory,
        SharedFault::Race(_) | SharedFault::MatrixRace(_) => FindingKind::SharedRace,
        SharedFault::InFlight(_) => FindingKind::InFlight,
        SharedFault::Proxy => FindingKind::ProxyFence,
        SharedFault::Object => FindingKind::Mbarrier,
    };
    fault_at(kind, lane as u32, address, fault.detail())
}

#[inline(always)]
fn aligned(address: u64, bytes: usize, lane: usize) -> Result<(), Fault> {
    if address & (bytes as u64 - 1) == 0 {
        return Ok(());
    }
    Err(fault_at(FindingKind::Misaligned, lane as u32, address, format!("{bytes} bytes")))
}

impl<'a> Context<'a> {
    fn race(&self, place: Place<'_>, bytes: usize, access: Access, lane: usize, address: u64) -> Result<(), Fault> {
        match self.launch.races.access(place.index, place.offset, bytes, &self.block.clock, access) {
            None => Ok(()),
            Some(other) => {
                let other = other.map_or("several blocks".into(), |number| format!("block number {number}"));
                Err(fault_at(FindingKind::GlobalRace, lane as u32, address, format!("with {other}")))
            }
        }
    }

    /// What is released at a word that is being read becomes known, at once or by a fence.
    fn see(&mut self, records: &Records, word: Word, order: Order) {
        records.read(word, order, &mut self.block.clock, &mut self.warp.state.global_fences);
    }

    /// What is being written to a word releases what its order and fences say.
    fn leave(&mut self, records: &mut Records, word: Word, lane: usize, order: Order, update: Update) {
        records.write(word, lane, order, update, &mut self.block.clock, &self.warp.state.global_fences);
    }

    /// Bytes in global memory that may be written.
    fn writable(&self, address: u64, bytes: usize, lane: usize) -> Result<Place<'a>, Fault> {
        let place = self
            .launch
            .memory
            .place(address, bytes)
            .map_err(|fault| fault_at(fault.kind, lane as u32, address, fault.detail))?;
        if place.is_read_only() {
            return Err(fault_at(FindingKind::OutOfBounds, lane as u32, address, "constants cannot be written"));
        }
        Ok(place)
    }

    /// Reads `out.len()` bytes (a power of two) in global memory.
    #[inline(always)]
    pub(crate) fn load_global(&self, lane: usize, address: u64, out: &mut [u8], access: Access) -> Result<(), Fault> {
        let bytes = out.len();
        aligned(address, bytes, lane)?;
        let place = self
            .launch
            .memory
            .place(address, bytes)
            .map_err(|fault| fault_at(fault.kind, lane as u32, address, fault.detail))?;
        if let Some(byte) = place.first_unwritten(bytes) {
            let detail = format!("byte {byte} of {bytes}");
            return Err(fault_at(FindingKind::UnwrittenMemory, lane as u32, address, detail));
        }
        self.race(place, bytes, access, lane, address)?;
        place.load(out);
        Ok(())
    }

    /// Reads `out.len()` bytes, a power of two.
    #[inline(always)]
    pub(crate) fn load(
        &mut self,
        space: Space,
        lane: usize,
        address: u64,
        out: &mut [u8],
        access: Access,
    ) -> Result<(), Fault> {
        let (space, inner) = space.resolve(address);
        aligned(inner, out.len(), lane)?;
        match space {
            Space::Generic | Space::Global => match (access, &self.launch.releases) {
                (Access::Strong(order), Some(releases)) => {
                    let records = releases.lock();
                    self.see(&records, (address, out.len()), order);
                    self.load_global(lane, address, out, access)
                }
                _ => self.load_global(lane, address, out, access),
            },
            Space::Shared => {
                let thread = self.thread(lane);
                let at = self.shared_place(inner, lane, address)?;
                self.cluster.shared.load(at, out, thread).map_err(|fault| shared_fault(fault, lane, address))
            }
            Space::Local => {
                let (bytes, written) = &self.warp.local[lane];
                let range = local_range(bytes.len(), inner, out.len(), lane)?;
                if written[range.clone()].contains(&false) {
                    return Err(fault_at(FindingKind::UnwrittenMemory, lane as u32, address, "local memory"));
                }
                out.copy_from_slice(&bytes[range]);
                Ok(())
            }
            Space::Param => {
                let range = local_range(self.launch.params.len(), inner, out.len(), lane)?;
                out.copy_from_slice(&self.launch.params[range]);
                Ok(())
            }
        }
    }

    /// Writes `bytes`, a power of two of them.
    #[inline]
    pub(crate) fn store(
        &mut self,
        space: Space,
        lane: usize,
        address: u64,
        bytes: &[u8],
        access: Access,
    ) -> Result<(), Fault> {
        let (space, inner) = space.resolve(address);
        aligned(inner, bytes.len(), lane)?;
        match space {
            Space::Generic | Space::Global => {
                let launch = self.launch;
                self.block.stored = true;
                let place = self.writable(address, bytes.len(), lane)?;
                if let (Access::Strong(order), Some(releases)) = (access, &launch.releases) {
                    let mut records = releases.lock();
                    self.race(place, bytes.len(), access, lane, address)?;
                    self.leave(&mut records, (address, bytes.len()), lane, order, Update::Replaces);
                    place.store(bytes);
                } else {
                    self.race(place, bytes.len(), access, lane, address)?;
                    place.store(bytes);
                }
                Ok(())
            }
            Space::Shared => {
                let thread = self.thread(lane);
                let at = self.shared_place(inner, lane, address)?;
                self.cluster.shared.store(at, bytes, thread).map_err(|fault| shared_fault(fault, lane, address))
            }
            Space::Local => {
                let (memory, written) = &mut self.warp.local[lane];
                let range = local_range(memory.len(), inner, bytes.len(), lane)?;
                memory[range.clone()].copy_from_slice(bytes);
                written[range].fill(true);
                Ok(())
            }
            Space::Param => {
                Err(fault_at(FindingKind::OutOfBounds, lane as u32, address, "parameters cannot be written"))
            }
        }
    }

    /// Replaces `bytes` bytes (2, 4 or 8) by `update` of them, atomically; what was there.
    pub(crate) fn update(
        &mut self,
        space: Space,
        lane: usize,
        address: u64,
        bytes: usize,
        access: Access,
        update: impl Fn(u64) -> u64,
    ) -> Result<u64, Fault> {
        let (space, inner) = space.resolve(address);
        aligned(inner, bytes, lane)?;
        match space {
            Space::Generic | Space::Global => {
                let launch = self.launch;
                self.block.stored = true;
                let place = self.writable(address, bytes, lane)?;
                if place.first_unwritten(bytes).is_some() {
                    return Err(fault_at(FindingKind::UnwrittenMemory, lane as u32, address, "by an atomic"));
                }
                if let (Access::Strong(order), Some(releases)) = (access, &launch.releases) {
                    let mut records = releases.lock();
                    self.see(&records, (address, bytes), order);
                    self.race(place, bytes, access, lane, address)?;
                    self.leave(&mut records, (address, bytes), lane, order, Update::Continues);
                    return Ok(place.update(bytes, update));
                }
                self.race(place, bytes, access, lane, address)?;
                Ok(place.update(bytes, update))
            }
            Space::Shared => {
                let thread = self.thread(lane);
                let at = self.shared_place(inner, lane, address)?;
                let shared = &mut self.cluster.shared;
                shared.update(at, bytes, thread, update).map_err(|fault| shared_fault(fault, lane, address))
            }
            Space::Local | Space::Param => {
                Err(fault_at(FindingKind::OutOfBounds, lane as u32, address, "an atomic in a private space"))
            }
        }
    }
}

fn local_range(size: usize, offset: u64, bytes: usize, lane: usize) -> Result<std::ops::Range<usize>, Fault> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= size as u64 => Ok(offset as usize..end as usize),
        _ => Err(fault_at(FindingKind::OutOfBounds, lane as u32, offset, format!("the space has {size} bytes"))),
    }
}

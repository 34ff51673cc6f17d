//! What the second GEMM reads of h while the first one may still run: counted by the one, awaited by the other.

use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::GroupedGemmParams;
use crate::ptx::thread::sleep;
use crate::ptx::{atomic, grid, mbarrier};

/// Nanoseconds between two looks at a number.
const PAUSE: u32 = 100;

/// Whether this GEMM counts what it writes.
#[inline(always)]
pub(super) fn counts(params: &GroupedGemmParams) -> bool {
    params.written != 0 && params.awaited == 0
}

/// Says that so many row tiles of an expert's h are written, by this thread or to its knowledge.
///
/// # Safety
/// The params' pointers are as documented there, and the GEMM [`counts`]; the kernel in front of it is done.
#[inline(always)]
pub(super) unsafe fn count(params: &GroupedGemmParams, expert: u32, row_tiles: u32) {
    // SAFETY: there is a number for each expert.
    unsafe { atomic::add_release((params.written as *mut u32).add(expert as usize), row_tiles) };
}

/// Waits, by a thread that copies, for the activations of a tile: the whole kernel in front of this one, or all of h of the
/// tile's expert. `most` are the slots of a token tile.
///
/// # Safety
/// As [`count`]; the tile has slots.
#[inline(always)]
pub(super) unsafe fn wait_for_activations(params: &GroupedGemmParams, tile: &Tile, most: u32) {
    if params.awaited == 0 {
        // Behind the first time, it is done.
        return grid::wait();
    }
    let all = params.awaited * tile.expert_slots.div_ceil(most);
    // SAFETY: there is a number for each expert.
    unsafe {
        while atomic::load_acquire((params.written as *const u32).add(tile.expert as usize)) < all {
            sleep(PAUSE);
        }
    }
    mbarrier::fence_proxy_async_global();
}

/// Lets the next kernel start, by a thread that multiplies. It reads the routing before it waits, so that is waited for (see
/// [`grid::follow_closely`]), which the kernel in front of a GEMM that awaits has done.
#[inline(always)]
pub(super) fn let_follow(params: &GroupedGemmParams) {
    if params.awaited == 0 {
        grid::follow_closely();
    } else {
        grid::launch_dependents();
    }
}

//! Shared memory that ordinary stores wrote and the async proxy uses.

use nvfp4_moe_emulator::FindingKind::{ProxyFence, SharedRace};

use super::At::Shared;
use super::{Pair, check};

/// A bulk copy over bytes that were stored before.
const OVER_A_STORE: &str = "mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
st.shared.b32 [%r2+32], 1;
BUG
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1], 64, [%r2]; // here
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
@!%p1 bra AGAIN;";

/// A bulk copy whose mbarrier has just been initialized.
const FRESH_OBJECT: &str = "mbarrier.init.shared.b64 [%r2], 1;
BUG
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1], 64, [%r2]; // here
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
@!%p1 bra AGAIN;";

/// Thread 0 copies over what the other warp stored, after a barrier.
const STORED_BY_OTHERS: &str = "setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
shl.b32 %r3, %r1, 2;
add.u32 %r3, %r3, %r2;
st.shared.b32 [%r3+16], %r1;
BUG
@!%p1 bra END;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1], 256, [%r2]; // here
AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra AGAIN;
END: ret;";

/// All threads store, thread 0 copies it to global memory.
const STORED: &str = "setp.eq.u32 %p1, %r1, 0;
shl.b32 %r3, %r1, 2;
add.u32 %r3, %r3, %r2;
st.shared.b32 [%r3], %r1;
BUG
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256; // here
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END: ret;";

pub(super) const PAIRS: &[Pair] = &[
    Pair::one(
        ProxyFence,
        "a copy over an ordinary store",
        OVER_A_STORE,
        ["", "fence.proxy.async.shared::cta;"],
        Shared(16),
    ),
    Pair::one(ProxyFence, "a fence of the other kind", OVER_A_STORE, ["membar.cta;", "fence.proxy.async;"], Shared(16)),
    Pair::one(
        ProxyFence,
        "an mbarrier initialized without a fence",
        FRESH_OBJECT,
        ["", "fence.mbarrier_init.release.cluster;"],
        Shared(0),
    ),
    Pair::of(
        ProxyFence,
        "a barrier without a fence",
        STORED_BY_OTHERS,
        ["bar.sync 0;", "fence.proxy.async.shared::cta;\nbar.sync 0;"],
        Shared(16),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        ProxyFence,
        "a fence before the others have stored",
        STORED_BY_OTHERS,
        ["@%p1 fence.proxy.async.shared::cta;\nbar.sync 0;", "bar.sync 0;\nfence.proxy.async.shared::cta;"],
        Shared(16),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        ProxyFence,
        "a store that the async proxy reads",
        STORED,
        ["bar.sync 0;", "fence.proxy.async;\nbar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        ProxyFence,
        "a fence of the reader alone, before the barrier",
        STORED,
        ["@%p1 fence.proxy.async;\nbar.sync 0;", "fence.proxy.async;\nbar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a fence without a barrier",
        STORED,
        ["fence.proxy.async;", "fence.proxy.async;\nbar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
];

#[test]
fn proxies_are_fenced() {
    check(PAIRS);
}

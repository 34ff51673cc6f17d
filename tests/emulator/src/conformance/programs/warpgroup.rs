//! What a kernel of sm_90a does around its products: registers of warps, dependent grids, bulk copies of all directions, and
//! an election whose winner copies.

use super::super::Check;
use super::{exact, of_sm_90a, scrambled};

/// `setmaxnreg` (9.7.19.5): one warpgroup gives registers away, the other takes them.
fn registers() -> Check {
    let body = "setp.ge.u32 %p1, %t, 128; @%p1 bra MORE; setmaxnreg.dec.sync.aligned.u32 40; add.u32 %r1, %t, 1; \
        bra DONE; MORE: setmaxnreg.inc.sync.aligned.u32 152; add.u32 %r1, %t, 2; DONE: \
        cvt.u64.u32 %rd1, %r1; st.global.b64 [%yours], %rd1;";
    let expected = (0..256).map(|t| if t < 128 { t + 1 } else { t + 2 }).collect();
    let check = exact("setmaxnreg.dec, setmaxnreg.inc", 90, 256, body, vec![0], expected);
    let ptx = check.ptx.replace("args[24])\n{", "args[24])\n.maxnreg 96\n{");
    of_sm_90a(Check { ptx, ..check })
}

/// `griddepcontrol` (9.7.13.13) where nothing depends on the grid.
fn dependent_grids() -> Check {
    let body = "griddepcontrol.wait; ld.global.b64 %rd1, [%mine]; st.global.b64 [%yours], %rd1; \
        griddepcontrol.launch_dependents;";
    exact("griddepcontrol.wait, griddepcontrol.launch_dependents", 90, 64, body, (1..65).collect(), (1..65).collect())
}

/// One elected lane fetches, prefetches before, and copies back what all threads have changed.
fn there_and_back(space: &str, hint: bool, fence: &str, read: &str) -> Check {
    let (suffix, policy) = if hint { (".L2::cache_hint", ", %rd9") } else { ("", "") };
    let name =
        format!("cp.async.bulk.{space}.global{suffix}, cp.async.bulk.global.shared::cta.bulk_group{suffix}{read}");
    let body = format!(
        "add.u32 %r1, %s, 128; mad.lo.u32 %r2, %t, 8, %r1; mov.b64 %rd9, 0x12F0000000000000; setp.ge.u32 %p2, %t, 32; \
         @%p2 bra READY; elect.sync %r7|%p3, -1; @!%p3 bra READY; mbarrier.init.shared.b64 [%s], 1; fence.proxy.async; \
         cp.async.bulk.prefetch.L2.global{suffix} [%in], 1024{policy}; \
         mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%s], 1024; \
         cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes{suffix} [%r1], [%in], 1024, [%s]{policy}; READY: bar.sync 0; \
         WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%s], 0; @!%p1 bra WAIT; ld.shared.b64 %rd2, [%r2]; \
         add.u64 %rd2, %rd2, 5; st.shared.b64 [%r2], %rd2; {fence} bar.sync 0; @%p2 bra DONE; elect.sync %r7|%p3, -1; \
         @!%p3 bra DONE; cp.async.bulk.global.shared::cta.bulk_group{suffix} [%out], [%r1], 512{policy}; \
         cp.async.bulk.commit_group; add.u64 %rd3, %out, 512; add.u32 %r1, %r1, 512; \
         cp.async.bulk.global.shared::cta.bulk_group{suffix} [%rd3], [%r1], 512{policy}; \
         cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 1; cp.async.bulk.wait_group{read} 0; \
         cp.async.bulk.wait_group 0; DONE:"
    );
    let inputs = scrambled(128);
    let expected = inputs.iter().map(|word| word.wrapping_add(5)).collect();
    of_sm_90a(exact(&name, 90, 128, &body, inputs, expected))
}

pub(super) fn checks() -> Vec<Check> {
    vec![
        registers(),
        dependent_grids(),
        there_and_back("shared::cluster", false, "fence.proxy.async;", ".read"),
        there_and_back("shared::cta", false, "fence.proxy.async.shared::cta;", ".read"),
        there_and_back("shared::cluster", true, "fence.proxy.async.shared::cluster;", ""),
        there_and_back("shared::cta", true, "fence.proxy.async; fence.proxy.async.global;", ""),
    ]
}

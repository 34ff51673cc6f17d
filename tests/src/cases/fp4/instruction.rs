//! The matrix instruction by itself, in a kernel that gives each lane the registers of the document's maps.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::setup::Lab;
use super::document::{K, LANE_WORDS, LANES, M, MINUS_ONE, N, ONE, Operands, SCALE_ONE, SCALE_TWO, c_element};
use crate::conformance::PtxLaunch;

/// One warp for each set of operands; `thread-id`s are immediates, as a kernel has them.
fn ptx(thread_id_a: usize, thread_id_b: usize) -> String {
    format!(
        ".version 8.8\n.target sm_120f\n.address_size 64\n.visible .entry k(.param .align 8 .b8 args[24])\n{{\n\
         .reg .b32 %r<3>, %a<4>, %b<2>, %scale<2>;\n.reg .f32 %c<4>, %d<4>;\n.reg .b64 %in, %out, %at;\n\
         ld.param.b64 %in, [args];\nld.param.b64 %out, [args+8];\n\
         mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmad.lo.u32 %r0, %r1, {LANES}, %r0;\n\
         mul.wide.u32 %at, %r0, {bytes};\nadd.u64 %in, %in, %at;\nmul.wide.u32 %at, %r0, 16;\nadd.u64 %out, %out, %at;\n\
         ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%in];\nld.global.v2.b32 {{%b0, %b1}}, [%in+16];\n\
         ld.global.v2.f32 {{%c0, %c1}}, [%in+24];\nld.global.v2.f32 {{%c2, %c3}}, [%in+32];\n\
         ld.global.v2.b32 {{%scale0, %scale1}}, [%in+40];\n\
         mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 \
         {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}}, \
         %scale0, {{0, {thread_id_a}}}, %scale1, {{0, {thread_id_b}}};\n\
         st.global.v4.f32 [%out], {{%d0, %d1, %d2, %d3}};\nret;\n}}\n",
        bytes = 4 * LANE_WORDS,
    )
}

/// Runs the instruction on all probes, whose results are exact, and compares every element.
fn compare(lab: &Lab<'_>, [thread_id_a, thread_id_b]: [usize; 2], probes: &[(String, Operands)]) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let words: Vec<u32> =
        probes.iter().flat_map(|(_, operands)| operands.registers(thread_id_a, thread_id_b)).collect();
    let launch = PtxLaunch {
        ptx: &ptx(thread_id_a, thread_id_b),
        target: "sm_120f",
        blocks: probes.len() as u32,
        threads: LANES as u32,
        shared_bytes: 0,
        cases: probes.len(),
    };
    // SAFETY: a lane reads its 12 words of its block's probe and writes 4.
    let results: Vec<f32> = unsafe { launch.run(device, &words, probes.len() * LANES * 4) }?;
    for ((what, operands), results) in probes.iter().zip(results.chunks_exact(LANES * 4)) {
        let expected = operands.product();
        for (place, result) in results.iter().enumerate() {
            let (row, column) = c_element(place / 4, place % 4);
            let expected = expected[row][column];
            ensure!(
                f64::from(*result) == expected,
                "{what}, selectors {thread_id_a} and {thread_id_b}: element ({row}, {column}), which is c{} of lane {}, is \
                 {result}, but {expected} was expected",
                place % 4,
                place / 4
            );
        }
    }
    Ok(())
}

/// A code that is not 0.
fn code(rng: &mut StdRng) -> u8 {
    rng.random_range(1..8) | rng.random_range(0..2) << 3
}

fn all_differ<T: std::hash::Hash + Eq>(mut all: impl Iterator<Item = T>) -> bool {
    let mut seen = HashSet::new();
    all.all(|one| seen.insert(one))
}

/// Each element of A, B and C alone, against operands in which no two rows and no two columns are alike.
pub(in crate::cases) fn fragment_maps(lab: &Lab<'_>) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(64);
    let mut full = Operands::zeros();
    full.a.as_flattened_mut().iter_mut().for_each(|a| *a = code(&mut rng));
    full.b.as_flattened_mut().iter_mut().for_each(|b| *b = code(&mut rng));
    ensure!(
        all_differ(full.a.iter())
            && all_differ((0..K).map(|k| full.a.map(|row| row[k])))
            && all_differ(full.b.iter())
            && all_differ((0..N).map(|n| full.b.map(|row| row[n]))),
        "two rows or columns of the probes are alike"
    );

    let mut probes = Vec::new();
    for k in 0..K {
        for m in 0..M {
            let mut operands = Operands { a: [[0; K]; M], ..full.clone() };
            operands.a[m][k] = if (m + k) % 3 == 0 { MINUS_ONE } else { ONE };
            probes.push((format!("A alone at ({m}, {k})"), operands));
        }
        for n in 0..N {
            let mut operands = Operands { b: [[0; N]; K], ..full.clone() };
            operands.b[k][n] = if (n + k) % 3 == 0 { MINUS_ONE } else { ONE };
            probes.push((format!("B alone at ({k}, {n})"), operands));
        }
    }
    let mut operands = full.clone();
    operands.c = std::array::from_fn(|m| std::array::from_fn(|n| (m * 100 + n) as f32 + 0.25));
    probes.push(("C".to_owned(), operands));
    // All codes, in all nibbles.
    for i in 0..32 {
        let mut operands = Operands::zeros();
        operands.a.as_flattened_mut().iter_mut().for_each(|code| *code = rng.random_range(0..16));
        operands.b.as_flattened_mut().iter_mut().for_each(|code| *code = rng.random_range(0..16));
        operands.c.as_flattened_mut().iter_mut().for_each(|c| *c = rng.random_range(-99i16..99).into());
        probes.push((format!("random codes {i}"), operands));
    }
    compare(lab, [0, 0], &probes)
}

/// Each scale alone, for all selectors.
pub(in crate::cases) fn scale_lanes(lab: &Lab<'_>) -> Result<()> {
    for thread_id_a in 0..2 {
        for thread_id_b in 0..4 {
            let mut rng = StdRng::seed_from_u64((4 * thread_id_a + thread_id_b) as u64);
            // Positive codes: no sum is the same with a scale of 2 at one place. All sums are exact in f32.
            let mut full = Operands::zeros();
            full.a.as_flattened_mut().iter_mut().for_each(|a| *a = code(&mut rng) & 7);
            full.b.as_flattened_mut().iter_mut().for_each(|b| *b = code(&mut rng) & 7);
            let mut probes = Vec::new();
            for quarter in 0..4 {
                for m in 0..M {
                    let mut operands = full.clone();
                    operands.scales_a[m][quarter] = SCALE_TWO;
                    probes.push((format!("scale {quarter} of row {m} of A"), operands));
                }
                for n in 0..N {
                    let mut operands = full.clone();
                    operands.scales_b[n][quarter] = SCALE_TWO;
                    probes.push((format!("scale {quarter} of column {n} of B"), operands));
                }
            }
            for i in 0..8 {
                // Two exponents and all mantissas on each side: a sum is a multiple of 2^-10, and below 2^14.
                let mut operands = full.clone();
                let scales = operands.scales_a.as_flattened_mut().iter_mut();
                for scale in scales.chain(operands.scales_b.as_flattened_mut()) {
                    *scale = SCALE_ONE - 8 + rng.random_range(0..16);
                }
                operands.a.as_flattened_mut().iter_mut().for_each(|code| *code |= rng.random_range(0..2) << 3);
                probes.push((format!("random scales {i}"), operands));
            }
            compare(lab, [thread_id_a, thread_id_b], &probes)?;
        }
    }
    Ok(())
}

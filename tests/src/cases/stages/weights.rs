//! Packing, and the kernel that measures how fast weights can be read.

use anyhow::Result;
use nvfp4_moe::checkpoint::RawMatrix;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::plan::Plan;
use nvfp4_moe::schedule::{Launch, Params, StagedExpert, pack_expert};
use nvfp4_moe_device::kernels::measure::{THREADS, UNLIKELY};
use nvfp4_moe_device::params::ReadParams;

use super::super::device_layout::{by_layout_for, layers};
use super::super::setup::Layer;
use super::{Bench, Lab, same};

/// Buffers of a matrix's codes and scales.
struct Staged([DeviceBuffer; 2]);

impl Staged {
    fn new(bench: &Bench<'_>, matrix: &RawMatrix<'_>) -> Result<Self> {
        Ok(Self([bench.upload(matrix.codes)?, bench.upload(matrix.scales)?]))
    }

    fn addresses(&self) -> (u64, u64) {
        (self.0[0].address(), self.0[1].address())
    }
}

/// The layer with every scale byte of 7 bits, that of NaN too, in each matrix.
fn with_every_scale(mut layer: Layer) -> Layer {
    for expert in &mut layer.experts {
        for matrix in expert.gate.iter_mut().chain([&mut expert.up, &mut expert.down]) {
            for (i, scale) in matrix.scales.iter_mut().enumerate() {
                *scale = (i * 37 % 128) as u8;
            }
        }
    }
    layer
}

pub(in crate::cases) fn pack(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    for layer in layers().into_iter().chain(layers().into_iter().map(with_every_scale)) {
        let plan = Plan::new(layer.spec, &bench.engine.device().limits(), 1)?;
        let expected = by_layout_for(plan.kernels(), &layer);
        let packed = bench.room(expected.len())?;
        for (local, id) in layer.spec.experts.ids().enumerate() {
            let expert = layer.experts[id].raw();
            let gate = expert.gate.as_ref().map(|gate| Staged::new(&bench, gate)).transpose()?;
            let [up, down] = [Staged::new(&bench, &expert.up)?, Staged::new(&bench, &expert.down)?];
            let staged = StagedExpert {
                gate: gate.as_ref().map_or((0, 0), Staged::addresses),
                up: up.addresses(),
                down: down.addresses(),
            };
            // SAFETY: the launches of the plan, over the packed bytes of all experts.
            unsafe { bench.run(&pack_expert(&plan, packed.address(), local, &staged))? };
        }
        same(&packed, &expected, &format!("{:?}", layer.spec))?;
    }
    Ok(())
}

/// One word in zeros makes the thread that reads it say so; nobody says anything otherwise.
pub(in crate::cases) fn read_all(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    const BLOCKS: u32 = 2;
    let pass = (BLOCKS * THREADS) as usize * 16;
    // Four passes at once, then a few one by one, the last of them not whole.
    for bytes in [4 * pass, 4 * pass + 2 * pass + 48, pass + 16, 16] {
        let words = bytes / 4;
        let ends = (1..=words * 4 / pass).map(|passes| passes * pass / 4 - 1);
        let places = (0..16).map(|i| i * words / 16 + i % 4).chain(ends).chain([words - 1]);
        for place in places.filter(|place| *place < words).map(Some).chain([None]) {
            let mut data = vec![0u32; words];
            if let Some(place) = place {
                data[place] = UNLIKELY;
            }
            let (data, sums) = (bench.upload(&data)?, bench.upload(&[0u32])?);
            let params = ReadParams { data: data.address(), bytes: bytes as u64, sums: sums.address() };
            let launch = Launch {
                kernel: "read_all",
                grid: [BLOCKS, 1, 1],
                threads: THREADS,
                shared_bytes: 0,
                params: Params::Read(params),
            };
            // SAFETY: the kernel's threads; the buffers have the documented sizes.
            unsafe { bench.run(&[launch])? };
            let expected = if place.is_some() { UNLIKELY } else { 0 };
            same(&sums, &[expected], &format!("{bytes} bytes, word {place:?}"))?;
        }
    }
    Ok(())
}

//! Pairs of f32 in a 64-bit register (PTX ISA 9.7.3.3, 9.7.3.4, 9.7.3.5, 9.7.3.6: `.f32x2`, sm_100 and newer).

use super::float::Around;
use super::{Decoder, Operation, Refusal, Statement, binary, ternary};
use crate::types::Type;

/// Applies `f` to each half.
#[inline(always)]
fn halves<const N: usize>(sources: [u64; N], f: impl Fn([u64; N]) -> u64) -> u64 {
    f(sources.map(|x| x & 0xFFFF_FFFF)) | f(sources.map(|x| x >> 32)) << 32
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if !matches!(s.name, "add" | "sub" | "mul" | "fma") || !s.modifiers.take("f32x2") {
        return Ok(None);
    }
    if s.name == "fma" {
        s.modifiers.need("rn")?;
    } else {
        s.modifiers.take("rn");
    }
    let around = Around { flush: s.modifiers.take("ftz"), saturate: false };
    let destination = d.destination(s, 0, Type::B64)?;
    let [a, b] = [d.source(s, 1, Type::B64)?, d.source(s, 2, Type::B64)?];
    let two = |f: fn(f32, f32) -> f32| {
        binary(destination, [a, b], move |a, b| {
            halves([a, b], |[a, b]| around.after(f(around.before(a), around.before(b))))
        })
    };
    Ok(Some(match s.name {
        "add" => two(|a, b| a + b),
        "sub" => two(|a, b| a - b),
        "mul" => binary(destination, [a, b], move |a, b| halves([a, b], |[a, b]| around.product(a, b))),
        _ => {
            let c = d.source(s, 3, Type::B64)?;
            ternary(destination, [a, b, c], move |a, b, c| halves([a, b, c], |[a, b, c]| around.fused(a, b, c)))
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_do_not_mix() {
        let pair = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        let sum = halves([pair(1.0, -2.0), pair(0.5, 4.0)], |[a, b]| {
            let around = Around { flush: false, saturate: false };
            around.after(around.before(a) + around.before(b))
        });
        assert_eq!(sum, pair(1.5, 2.0));
    }
}

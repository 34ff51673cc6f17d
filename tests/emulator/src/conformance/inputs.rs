//! Operands: their kinds, and values worth trying.

use crate::types::truncate;

/// What an operand is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An integer of 8, 16, 32 or 64 bits.
    Int(u32),
    /// A small 32-bit number: a shift amount, a position, a length.
    Amount,
    /// A predicate.
    Predicate,
    /// f16.
    F16,
    /// Two f16.
    F16x2,
    /// bf16.
    Bf16,
    /// Two bf16.
    Bf16x2,
    /// f32.
    F32,
    /// Two f32.
    F32x2,
    /// f64.
    F64,
}

impl Kind {
    pub(super) fn named(name: &str) -> Self {
        match name {
            "i8" => Self::Int(8),
            "i16" => Self::Int(16),
            "i32" => Self::Int(32),
            "i64" => Self::Int(64),
            "n" => Self::Amount,
            "p" => Self::Predicate,
            "h" => Self::F16,
            "h2" => Self::F16x2,
            "b" => Self::Bf16,
            "b2" => Self::Bf16x2,
            "f" => Self::F32,
            "f2" => Self::F32x2,
            "d" => Self::F64,
            _ => panic!("there is no operand kind {name}"),
        }
    }

    pub(super) const fn bits(self) -> u32 {
        match self {
            Self::Int(bits) => bits,
            Self::Predicate => 1,
            Self::F16 | Self::Bf16 => 16,
            Self::Amount | Self::F16x2 | Self::Bf16x2 | Self::F32 => 32,
            Self::F64 | Self::F32x2 => 64,
        }
    }

    /// The bits, with one NaN for all.
    #[must_use]
    pub fn canonical(self, bits: u64) -> u64 {
        let one =
            |bits: u64, infinity: u64, sign: u64| if bits & !sign > infinity { !sign & (2 * sign - 1) } else { bits };
        let two = |infinity| one(bits & 0xFFFF, infinity, 0x8000) | one(bits >> 16 & 0xFFFF, infinity, 0x8000) << 16;
        match self {
            Self::F16 => one(bits, 0x7C00, 0x8000),
            Self::Bf16 => one(bits, 0x7F80, 0x8000),
            Self::F16x2 => two(0x7C00),
            Self::Bf16x2 => two(0x7F80),
            Self::F32 => one(bits, 0x7F80_0000, 0x8000_0000),
            Self::F32x2 => Self::F32.canonical(bits & 0xFFFF_FFFF) | Self::F32.canonical(bits >> 32) << 32,
            Self::F64 if f64::from_bits(bits).is_nan() => 0x7FFF_FFFF_FFFF_FFFF,
            _ => bits,
        }
    }

    /// The numbers of floating-point kinds: two of packed ones.
    pub(super) fn values(self, bits: u64) -> Vec<f64> {
        let f16 = |bits: u64| half::f16::from_bits(bits as u16).to_f64();
        let bf16 = |bits: u64| half::bf16::from_bits(bits as u16).to_f64();
        let f32 = |bits: u64| f64::from(f32::from_bits(bits as u32));
        match self {
            Self::F16 => vec![f16(bits)],
            Self::F16x2 => vec![f16(bits), f16(bits >> 16)],
            Self::Bf16 => vec![bf16(bits)],
            Self::Bf16x2 => vec![bf16(bits), bf16(bits >> 16)],
            Self::F32 => vec![f32(bits)],
            Self::F32x2 => vec![f32(bits), f32(bits >> 32)],
            Self::F64 => vec![f64::from_bits(bits)],
            Self::Int(_) | Self::Amount | Self::Predicate => Vec::new(),
        }
    }

    fn special(self) -> Vec<u64> {
        match self {
            Self::Int(bits) => {
                let top = 1u64 << (bits - 1);
                let half = 1u64 << (bits / 2);
                [0, 1, 2, 3, 7, 31, 32, 33, half - 1, half, half + 1, top - 2, top - 1, top, top + 1]
                    .into_iter()
                    .chain([u64::MAX, u64::MAX - 1, u64::MAX - 6, 0xAAAA_AAAA_AAAA_AAAA, 0x0123_4567_89AB_CDEF])
                    .map(|value| truncate(value, bits))
                    .collect()
            }
            Self::Amount => {
                vec![0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 255, 256, 257, 0xFFFF_FFFF]
            }
            Self::Predicate => vec![0, 1],
            Self::F16 => halves(&HALVES),
            Self::Bf16 => halves(&BRAINS),
            Self::F16x2 => pairs(&HALVES),
            Self::Bf16x2 => pairs(&BRAINS),
            Self::F32x2 => {
                let all = Self::F32.special();
                all.iter().enumerate().map(|(i, low)| low | all[(i * 7 + 3) % all.len()] << 32).collect()
            }
            Self::F32 => SINGLES.iter().flat_map(|&bits| [bits, bits | 0x8000_0000]).map(u64::from).collect(),
            Self::F64 => DOUBLES.iter().flat_map(|&bits| [bits, bits | 1 << 63]).collect(),
        }
    }

    /// A random value; floating-point numbers mostly of middling size.
    fn random(self, random: &mut Random) -> u64 {
        let bits = random.next();
        let near_one = bits >> 62 != 0;
        match self {
            Self::Amount => bits >> 20 & 63,
            Self::F32 if near_one => bits & 0x80FF_FFFF | (118 + (bits >> 40) % 18) << 23 & 0x7F80_0000,
            Self::F64 if near_one => bits & 0x800F_FFFF_FFFF_FFFF | (1010 + (bits >> 40) % 28) << 52,
            _ => truncate(bits, self.bits()),
        }
    }
}

fn halves(patterns: &[u16]) -> Vec<u64> {
    patterns.iter().flat_map(|&bits| [bits, bits | 0x8000]).map(u64::from).collect()
}

/// Each pattern low, with another one high.
fn pairs(patterns: &[u16]) -> Vec<u64> {
    let all = halves(patterns);
    all.iter().enumerate().map(|(i, low)| low | all[(i * 7 + 3) % all.len()] << 16).collect()
}

/// Zero, subnormal, ordinary, huge, infinite, NaN: f16, bf16, f32, f64.
const HALVES: [u16; 17] = [
    0, 1, 2, 0x1FF, 0x3FF, 0x400, 0x401, 0x3800, 0x3BFE, 0x3BFF, 0x3C00, 0x3C01, 0x4248, 0x7BFF, 0x7C00, 0x7C01, 0x7E00,
];
const BRAINS: [u16; 16] =
    [0, 1, 2, 0x3F, 0x7F, 0x80, 0x81, 0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0];
const SINGLES: [u32; 31] = [
    0,
    1,
    2,
    0x0040_0000,
    0x007F_FFFF,
    0x0080_0000,
    0x0080_0001,
    0x3300_0000,
    0x3380_0000,
    0x3400_0000,
    0x3EFF_FFFF,
    0x3F00_0000,
    0x3F7F_FFFE,
    0x3F7F_FFFF,
    0x3F80_0000,
    0x3F80_0001,
    0x3FC0_0000,
    0x4020_0000,
    0x4049_0FDB,
    0x43E0_0000,
    0x4380_0000,
    0x477F_E000,
    0x477F_F000,
    0x4B00_0001,
    0x4F00_0000,
    0x4F80_0000,
    0x5F00_0000,
    0x7F7F_FFFF,
    0x7F80_0000,
    0x7F80_0001,
    0x7FC0_0000,
];
const DOUBLES: [u64; 24] = [
    0,
    1,
    0x000F_FFFF_FFFF_FFFF,
    0x0010_0000_0000_0000,
    0x3690_0000_0000_0000,
    0x3800_0000_0000_0000,
    0x380F_FFFF_E000_0000,
    0x380F_FFFF_EFFF_FFFF,
    0x380F_FFFF_F000_0000,
    0x380F_FFFF_FFFF_FFFF,
    0x3FDF_FFFF_FFFF_FFFF,
    0x3FE0_0000_0000_0000,
    0x3FEF_FFFF_FFFF_FFFF,
    0x3FF0_0000_0000_0000,
    0x3FF8_0000_0000_0000,
    0x4004_0000_0000_0000,
    0x41DF_FFFF_FFC0_0000,
    0x41E0_0000_0000_0000,
    0x43E0_0000_0000_0000,
    0x47EF_FFFF_E000_0000,
    0x47EF_FFFF_F000_0000,
    0x7FEF_FFFF_FFFF_FFFF,
    0x7FF0_0000_0000_0000,
    0x7FF8_0000_0000_0000,
];

/// A small generator of random numbers, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }
}

/// At most so many combinations of special values.
const COMBINATIONS: usize = 6000;
const RANDOM: usize = 2000;

/// Cases for operands of these kinds.
pub(super) fn wide(kinds: &[Kind]) -> Vec<Vec<u64>> {
    if let [kind] = kinds
        && kind.bits() <= 16
    {
        return (0..1u64 << kind.bits()).map(|bits| vec![bits]).collect();
    }
    let mut random = Random(kinds.len() as u64);
    let mut cases = vec![Vec::new()];
    for kind in kinds {
        let special = kind.special();
        cases = cases
            .iter()
            .flat_map(|case| special.iter().map(move |&value| [case.as_slice(), &[value]].concat()))
            .collect();
    }
    while cases.len() > COMBINATIONS {
        let keep = random.next() as usize % cases.len();
        cases.swap_remove(keep);
    }
    cases.extend((0..RANDOM).map(|_| kinds.iter().map(|kind| kind.random(&mut random)).collect()));
    // Special values beside random ones.
    for i in 0..kinds.len() {
        for &value in &kinds[i].special() {
            let mut case: Vec<u64> = kinds.iter().map(|kind| kind.random(&mut random)).collect();
            case[i] = value;
            cases.push(case);
        }
    }
    cases
}

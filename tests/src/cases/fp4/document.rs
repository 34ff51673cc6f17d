//! `mma.sync.aligned.m16n8k64` with `.kind::mxf4nvf4.block_scale.scale_vec::4X` and `.ue4m3` scales, as the PTX ISA document
//! gives it: which lane holds what, and what the numbers mean.

pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
pub(super) const K: usize = 64;
/// K that a scale is for: scale_A is M x 4, scale_B 4 x N (9.7.14.3, table 35).
pub(super) const SCALE_K: usize = K / 4;
pub(super) const LANES: usize = 32;

/// Words of a lane's operands: A, B, C, scales of A, scales of B.
pub(super) const LANE_WORDS: usize = 4 + 2 + 4 + 1 + 1;

/// 1 and -1 in E2M1, 1 and 2 in UE4M3.
pub(super) const ONE: u8 = 0b0010;
pub(super) const MINUS_ONE: u8 = 0b1010;
pub(super) const SCALE_ONE: u8 = 0x38;
pub(super) const SCALE_TWO: u8 = 0x40;
/// Not a number, in UE4M3.
pub(super) const SCALE_NAN: u8 = 0x7F;

/// (row, column) of the element `a_i` of a lane, i below 32 (9.7.14.5.11, "Multiplicand A").
pub(super) fn a_element(lane: usize, i: usize) -> (usize, usize) {
    let (group, in_group) = (lane >> 2, lane % 4);
    let row = if i < 8 || (16..24).contains(&i) { group } else { group + 8 };
    let column = if i < 16 { in_group * 8 + (i & 7) } else { in_group * 8 + (i & 7) + 32 };
    (row, column)
}

/// (row, column) of the element `b_i` of a lane, i below 16 (9.7.14.5.11, "Multiplicand B").
pub(super) fn b_element(lane: usize, i: usize) -> (usize, usize) {
    let (group, in_group) = (lane >> 2, lane % 4);
    let row = if i < 8 { in_group * 8 + (i & 7) } else { in_group * 8 + (i & 7) + 32 };
    (row, group)
}

/// (row, column) of the element `c_i` of a lane, i below 4 (9.7.14.5.11, "Accumulators").
pub(super) fn c_element(lane: usize, i: usize) -> (usize, usize) {
    let (group, in_group) = (lane >> 2, lane % 4);
    let row = if i < 2 { group } else { group + 8 };
    (row, in_group * 2 + (i & 1))
}

/// Row of A whose four scales are in a lane's `scale-a-data`, if `thread-id-a` selects that lane.
///
/// 9.7.14.3: 0 selects the two lower threads of each quad, 1 the two upper ones. Which of the two has which row is drawn in
/// figure 43: the first has that of the quad's number, the second the one 8 below. CUTLASS has the same as its `SFALayout`
/// of `SM120_16x8x64_TN_VS`: threads (2,2,8) with strides (8,0,1) along M.
pub(super) fn scale_a_row(lane: usize, thread_id: usize) -> Option<usize> {
    let in_quad = lane % 4;
    (in_quad / 2 == thread_id).then_some(lane / 4 + 8 * (in_quad % 2))
}

/// Column of B whose four scales are in a lane's `scale-b-data`, if `thread-id-b` selects that lane (9.7.14.3, figure 44).
pub(super) fn scale_b_column(lane: usize, thread_id: usize) -> Option<usize> {
    (lane % 4 == thread_id).then_some(lane / 4)
}

/// Value of an E2M1 code: sign, two bits of exponent with bias 1, one of mantissa.
pub(super) fn e2m1(code: u8) -> f64 {
    let magnitude = match code >> 1 & 3 {
        0 => 0.5 * f64::from(code & 1),
        exponent => (1.0 + 0.5 * f64::from(code & 1)) * f64::from(1 << (exponent - 1)),
    };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Value of a UE4M3 number: four bits of exponent with bias 7, three of mantissa; 0x7F is no number.
pub(super) fn ue4m3(byte: u8) -> f64 {
    let mantissa = f64::from(byte & 7) / 8.0;
    match byte >> 3 {
        _ if byte == SCALE_NAN => f64::NAN,
        0 => mantissa * 2f64.powi(-6),
        exponent => (1.0 + mantissa) * 2f64.powi(i32::from(exponent) - 7),
    }
}

/// Operands as matrices.
#[derive(Clone)]
pub(super) struct Operands {
    /// Codes of (row, k).
    pub(super) a: [[u8; K]; M],
    /// Codes of (k, column).
    pub(super) b: [[u8; N]; K],
    pub(super) c: [[f32; N]; M],
    /// Scales of (row, quarter of K).
    pub(super) scales_a: [[u8; 4]; M],
    /// Scales of (column, quarter of K).
    pub(super) scales_b: [[u8; 4]; N],
}

impl Operands {
    /// Zeros under scales of 1.
    pub(super) fn zeros() -> Self {
        Self {
            a: [[0; K]; M],
            b: [[0; N]; K],
            c: [[0.0; N]; M],
            scales_a: [[SCALE_ONE; 4]; M],
            scales_b: [[SCALE_ONE; 4]; N],
        }
    }

    /// [`LANE_WORDS`] words of each lane. Scales of lanes that are not selected are NaN: whoever uses them shows it.
    pub(super) fn registers(&self, thread_id_a: usize, thread_id_b: usize) -> Vec<u32> {
        // The elements of a register are its nibbles, low to high; the scales its bytes.
        let eight = |code: &dyn Fn(usize) -> u8| (0..8).fold(0, |word, i| word | u32::from(code(i)) << (4 * i));
        let mut words = Vec::with_capacity(LANES * LANE_WORDS);
        for lane in 0..LANES {
            let a = |i: usize| {
                let (row, k) = a_element(lane, i);
                self.a[row][k]
            };
            let b = |i: usize| {
                let (k, column) = b_element(lane, i);
                self.b[k][column]
            };
            words.extend((0..4).map(|register| eight(&|i| a(8 * register + i))));
            words.extend((0..2).map(|register| eight(&|i| b(8 * register + i))));
            words.extend((0..4).map(|i| {
                let (row, column) = c_element(lane, i);
                self.c[row][column].to_bits()
            }));
            let scales_a = scale_a_row(lane, thread_id_a).map_or([SCALE_NAN; 4], |row| self.scales_a[row]);
            let scales_b = scale_b_column(lane, thread_id_b).map_or([SCALE_NAN; 4], |column| self.scales_b[column]);
            words.extend([scales_a, scales_b].map(u32::from_le_bytes));
        }
        words
    }

    /// `(A * scale_A) * (B * scale_B) + C` in f64.
    pub(super) fn product(&self) -> [[f64; N]; M] {
        let mut d = [[0.0; N]; M];
        for (row, d) in d.iter_mut().enumerate() {
            for (column, d) in d.iter_mut().enumerate() {
                let products = (0..K).map(|k| {
                    let a = e2m1(self.a[row][k]) * ue4m3(self.scales_a[row][k / SCALE_K]);
                    a * e2m1(self.b[k][column]) * ue4m3(self.scales_b[column][k / SCALE_K])
                });
                *d = products.sum::<f64>() + f64::from(self.c[row][column]);
            }
        }
        d
    }
}

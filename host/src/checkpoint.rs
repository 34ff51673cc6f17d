//! Stand-in.

/// One matrix.
#[derive(Debug, Clone, Copy)]
pub struct RawMatrix<'a> {
    /// N.
    pub rows: usize,
    /// K.
    pub cols: usize,
    /// Codes.
    pub codes: &'a [u8],
    /// Scales.
    pub scales: &'a [u8],
    /// g.
    pub weight_scale: f32,
    /// g of the input.
    pub input_scale: Option<f32>,
}

/// One expert.
#[derive(Debug, Clone, Copy)]
pub struct RawExpert<'a> {
    /// Gate.
    pub gate: Option<RawMatrix<'a>>,
    /// Up.
    pub up: RawMatrix<'a>,
    /// Down.
    pub down: RawMatrix<'a>,
}

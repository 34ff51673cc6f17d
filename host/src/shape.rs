//! Sizes of one Mixture-of-Experts layer, and which of its experts a rank holds.

use thiserror::Error;

/// Elements that share one block scale; every GEMM axis that is quantized is a multiple of it.
const BLOCK_ELEMS: usize = 16;

/// Largest value of any size: far beyond every model, and small enough that no product of sizes overflows anywhere.
const MAX_SIZE: usize = 1 << 20;

const AT_LEAST: &str = "be at least 1; give more";

const AT_MOST: &str = "be at most 1048576, the largest size that this library counts with; give less";

const MULTIPLE_OF_BLOCK: &str =
    "be above 0 and a multiple of 16, the number of elements that share one NVFP4 block scale; give such a size";

/// A size that no layer can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{axis} is {got}, but must {must}")]
pub struct ShapeError {
    /// Which size: `hidden`, `intermediate`, `experts`, `topk`, `ranks` or `rank`.
    pub axis: &'static str,
    /// The value found.
    pub got: usize,
    /// What is allowed and what to do, to be read after "must".
    pub must: &'static str,
}

/// Sizes of one Mixture-of-Experts layer of the model, all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MoeShape {
    /// Elements of a token's hidden state: a multiple of 16.
    pub hidden: usize,
    /// Elements between the two matrix products: a multiple of 16.
    pub intermediate: usize,
    /// All experts of the layer, wherever they are.
    pub experts: usize,
    /// Experts that the router picks for each token.
    pub topk: usize,
}

impl MoeShape {
    /// A checked shape.
    ///
    /// # Errors
    /// [`ShapeError`] naming the first size that is not allowed (see [`Self::validate`]).
    pub const fn new(hidden: usize, intermediate: usize, experts: usize, topk: usize) -> Result<Self, ShapeError> {
        let shape = Self { hidden, intermediate, experts, topk };
        match shape.validate() {
            Ok(()) => Ok(shape),
            Err(error) => Err(error),
        }
    }

    /// Checks every size.
    ///
    /// # Errors
    /// [`ShapeError`] when `hidden` or `intermediate` is 0 or not a multiple of 16, `experts` or `topk` is 0, or any of
    /// them is above 2^20.
    pub const fn validate(&self) -> Result<(), ShapeError> {
        if let Err(error) = check_blocks("hidden", self.hidden) {
            return Err(error);
        }
        if let Err(error) = check_blocks("intermediate", self.intermediate) {
            return Err(error);
        }
        if let Err(error) = check_size("experts", self.experts) {
            return Err(error);
        }
        check_size("topk", self.topk)
    }
}

/// A layer of a published model, as one rank holds it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelShape {
    /// The model, and over how many ranks its experts are spread where that is not one: `-ep8`.
    pub name: &'static str,
    /// Sizes; `experts` are those of the rank.
    pub shape: MoeShape,
    /// The model's clamp.
    pub limit: Option<f32>,
}

const fn model(name: &'static str, sizes: [usize; 4], limit: Option<f32>) -> ModelShape {
    let [hidden, intermediate, experts, topk] = sizes;
    ModelShape { name, shape: MoeShape { hidden, intermediate, experts, topk }, limit }
}

/// Layers to measure.
pub const MODELS: [ModelShape; 6] = [
    model("deepseek-v4-pro-ep8", [7168, 3072, 48, 6], Some(10.0)),
    model("deepseek-v3-ep8", [7168, 2048, 32, 8], None),
    model("kimi-k2-ep8", [7168, 2048, 48, 8], None),
    model("qwen3-30b", [2048, 768, 128, 8], None),
    model("qwen3-235b", [4096, 1536, 128, 8], None),
    model("glm-4.7-ep8", [5120, 1536, 20, 8], None),
];

/// Checks that `got` elements are whole blocks of 16, at least one and not too many.
pub(crate) const fn check_blocks(axis: &'static str, got: usize) -> Result<(), ShapeError> {
    if got == 0 || !got.is_multiple_of(BLOCK_ELEMS) {
        return Err(ShapeError { axis, got, must: MULTIPLE_OF_BLOCK });
    }
    check_size(axis, got)
}

const fn check_size(axis: &'static str, got: usize) -> Result<(), ShapeError> {
    let must = match got {
        0 => AT_LEAST,
        1..=MAX_SIZE => return Ok(()),
        _ => AT_MOST,
    };
    Err(ShapeError { axis, got, must })
}

/// The experts `first .. first + count` of a layer: those that one rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertRange {
    /// Global id of the first expert.
    pub first: usize,
    /// How many experts; 0 is allowed.
    pub count: usize,
}

impl ExpertRange {
    /// All `experts` of a layer on one rank.
    #[must_use]
    pub const fn all(experts: usize) -> Self {
        Self { first: 0, count: experts }
    }

    /// The share of `rank` when `experts` are spread over `ranks` in order: the first `experts % ranks` ranks
    /// hold one more than the others. With more ranks than experts the last ranks hold none.
    ///
    /// # Errors
    /// [`ShapeError`] when `ranks` is 0 or above 2^20, or `rank` is not below `ranks`.
    pub const fn of_rank(experts: usize, ranks: usize, rank: usize) -> Result<Self, ShapeError> {
        if let Err(error) = check_size("ranks", ranks) {
            return Err(error);
        }
        if rank >= ranks {
            return Err(ShapeError {
                axis: "rank",
                got: rank,
                must: "be below the number of ranks (ranks count from 0); choose a lower one, or give more ranks",
            });
        }
        let (share, longer) = (experts / ranks, experts % ranks);
        let before = if rank < longer { rank } else { longer };
        Ok(Self { first: rank * share + before, count: share + (rank < longer) as usize })
    }

    /// Global id behind the last expert; the largest number where there is no such id.
    #[must_use]
    pub const fn end(self) -> usize {
        self.first.saturating_add(self.count)
    }

    /// Whether the rank holds no expert.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether the rank holds the expert with this global id.
    #[must_use]
    pub const fn contains(self, expert: usize) -> bool {
        expert >= self.first && expert - self.first < self.count
    }

    /// The global ids, ascending.
    #[must_use]
    pub fn ids(self) -> std::ops::Range<usize> {
        self.first..self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_cover_every_expert_once() {
        for experts in [0, 1, 5, 36, 40, 60, 130, 384] {
            for ranks in [1, 2, 3, 7, 8, 64] {
                let mut next = 0;
                let mut counts = Vec::new();
                for rank in 0..ranks {
                    let range = ExpertRange::of_rank(experts, ranks, rank).unwrap();
                    assert_eq!(range.first, next, "{experts} experts, rank {rank} of {ranks}");
                    next = range.end();
                    counts.push(range.count);
                }
                assert_eq!(next, experts);
                assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
                assert!(counts[0] - counts[ranks - 1] <= 1, "{counts:?}");
            }
        }
    }

    #[test]
    fn uneven_shares_go_to_the_first_ranks() {
        assert_eq!(ExpertRange::of_rank(5, 3, 1), Ok(ExpertRange { first: 2, count: 2 }));
        assert_eq!(ExpertRange::of_rank(5, 3, 2), Ok(ExpertRange { first: 4, count: 1 }));
        assert!(ExpertRange::of_rank(2, 3, 2).unwrap().is_empty());
        assert_eq!(ExpertRange::of_rank(5, 3, 3).unwrap_err().axis, "rank");
        for ranks in [0, usize::MAX] {
            assert_eq!(ExpertRange::of_rank(5, ranks, 0).unwrap_err().axis, "ranks");
        }
        assert_eq!(ExpertRange { first: usize::MAX, count: 2 }.end(), usize::MAX, "beyond every layer, not wrapped");
        let range = ExpertRange { first: 2, count: 2 };
        let held: Vec<_> = (0..6).filter(|&e| range.contains(e)).collect();
        assert_eq!(held, [2, 3]);
    }

    #[test]
    fn wrong_sizes_are_named() {
        assert!(MoeShape::new(2880, 176, 5, 1).is_ok());
        for (shape, axis) in [
            (MoeShape::new(24, 16, 1, 1), "hidden"),
            (MoeShape::new(0, 16, 1, 1), "hidden"),
            (MoeShape::new(16, 8, 1, 1), "intermediate"),
            (MoeShape::new(16, 16, 0, 1), "experts"),
            (MoeShape::new(16, 16, 1, 0), "topk"),
            (MoeShape::new(1 << 21, 16, 1, 1), "hidden"),
            (MoeShape::new(16, usize::MAX - 15, 1, 1), "intermediate"),
            (MoeShape::new(16, 16, 1 << 32, 1), "experts"),
            (MoeShape::new(16, 16, 1, usize::MAX), "topk"),
        ] {
            assert_eq!(shape.unwrap_err().axis, axis);
        }
        // What is allowed multiplies without overflow: bytes of the f32 values of all experts, and of a million tokens.
        let largest = MoeShape::new(MAX_SIZE, MAX_SIZE, MAX_SIZE, MAX_SIZE).unwrap();
        assert!(largest.hidden.checked_mul(largest.intermediate * largest.experts * 3).is_some());
        let message = MoeShape::new(24, 16, 1, 1).unwrap_err().to_string();
        assert!(message.starts_with("hidden is 24, but must be above 0 and a multiple of 16"), "{message}");
    }
}

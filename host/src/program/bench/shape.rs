//! Sizes to measure: those of published models on one rank, or any others.

use std::str::FromStr;

use nvfp4_moe::shape::MoeShape;

/// A layer's sizes on one rank, by name.
#[derive(Clone, Debug)]
pub(super) struct BenchShape {
    pub(super) name: String,
    /// `experts` are those of the rank.
    pub(super) shape: MoeShape,
    /// The model's clamp.
    pub(super) limit: Option<f32>,
}

/// Name, hidden, intermediate, experts of a rank, topk, clamp.
const MODELS: [(&str, [usize; 4], Option<f32>); 6] = [
    ("deepseek-v4-pro-ep8", [7168, 3072, 48, 6], Some(10.0)),
    ("deepseek-v3-ep8", [7168, 2048, 32, 8], None),
    ("kimi-k2-ep8", [7168, 2048, 48, 8], None),
    ("qwen3-30b", [2048, 768, 128, 8], None),
    ("qwen3-235b", [4096, 1536, 128, 8], None),
    ("glm-4.7-ep8", [5120, 1536, 20, 8], None),
];

impl FromStr for BenchShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let of = |[hidden, intermediate, experts, topk]: [usize; 4], limit| {
            let shape = MoeShape::new(hidden, intermediate, experts, topk).map_err(|error| error.to_string())?;
            if topk > experts {
                return Err(format!("topk is {topk}, but must be at most the rank's {experts} experts"));
            }
            Ok(Self { name: text.to_owned(), shape, limit })
        };
        if let Some(&(_, sizes, limit)) = MODELS.iter().find(|(name, ..)| *name == text) {
            return of(sizes, limit);
        }
        let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
        let Some(sizes) = sizes.and_then(|sizes| <[usize; 4]>::try_from(sizes).ok()) else {
            let names = MODELS.map(|(name, ..)| name).join(", ");
            return Err(format!(
                "it must be one of {names}, or HIDDENxINTERMEDIATExEXPERTSxTOPK such as 2048x768x128x8"
            ));
        };
        of(sizes, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_parsed() {
        for (name, sizes, _) in MODELS {
            assert_eq!(name.parse::<BenchShape>().unwrap().shape.hidden, sizes[0]);
        }
        let shape = "320x176x5x2".parse::<BenchShape>().unwrap().shape;
        assert_eq!(shape, MoeShape { hidden: 320, intermediate: 176, experts: 5, topk: 2 });
        for (text, part) in [("gpt", "one of"), ("1x2x3", "one of"), ("24x16x2x1", "hidden"), ("16x16x2x3", "topk")] {
            let error = text.parse::<BenchShape>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}

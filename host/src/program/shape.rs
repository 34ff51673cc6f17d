//! Sizes to measure: those of published models on one rank, or any others.

use std::str::FromStr;

use nvfp4_moe::shape::{MODELS, MoeShape};

/// A layer's sizes on one rank, by name.
#[derive(Clone, Debug)]
pub(super) struct NamedShape {
    pub(super) name: String,
    /// `experts` are those of the rank.
    pub(super) shape: MoeShape,
    /// The model's clamp.
    pub(super) limit: Option<f32>,
}

/// One value of `--shape`: a layer, or all named ones.
#[derive(Clone, Debug)]
pub(super) struct NamedShapes(pub(super) Vec<NamedShape>);

impl FromStr for NamedShapes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names: Vec<&str> = if text == "all" { MODELS.iter().map(|model| model.name).collect() } else { vec![text] };
        names.into_iter().map(str::parse).collect::<Result<_, _>>().map(Self).map_err(|error: String| {
            // Where one layer is meant, `all` is none.
            error.replacen("it must be one of", "it must be all, one of", 1)
        })
    }
}

impl FromStr for NamedShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(model) = MODELS.iter().find(|model| model.name == text) {
            return Ok(Self { name: text.to_owned(), shape: model.shape, limit: model.limit });
        }
        let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
        let Some([hidden, intermediate, experts, topk]) = sizes.and_then(|sizes| <[usize; 4]>::try_from(sizes).ok())
        else {
            let names = MODELS.map(|model| model.name).join(", ");
            return Err(format!(
                "it must be one of {names}, or HIDDENxINTERMEDIATExEXPERTSxTOPK such as 2048x768x128x8"
            ));
        };
        let shape = MoeShape::new(hidden, intermediate, experts, topk).map_err(|error| error.to_string())?;
        if topk > experts {
            return Err(format!(
                "topk is {topk}, but must be at most the rank's {experts} experts; give fewer, or more experts"
            ));
        }
        Ok(Self { name: text.to_owned(), shape, limit: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_parsed() {
        for model in MODELS {
            assert_eq!(model.name.parse::<NamedShape>().unwrap().shape, model.shape);
            assert!(model.shape.validate().is_ok() && model.shape.topk <= model.shape.experts, "{}", model.name);
        }
        let shape = "320x176x5x2".parse::<NamedShape>().unwrap().shape;
        assert_eq!(shape, MoeShape { hidden: 320, intermediate: 176, experts: 5, topk: 2 });
        let names: Vec<_> = "all".parse::<NamedShapes>().unwrap().0.into_iter().map(|shape| shape.name).collect();
        assert_eq!(names, MODELS.map(|model| model.name));
        assert_eq!("320x176x5x2".parse::<NamedShapes>().unwrap().0[0].shape, shape);
        assert!("gpt".parse::<NamedShapes>().unwrap_err().contains("must be all, one of"));
        for (text, part) in [
            ("gpt", "must be one of"),
            ("all", "must be one of"),
            ("1x2x3", "must be one of"),
            ("24x16x2x1", "hidden"),
            ("16x16x2x3", "topk"),
        ] {
            let error = text.parse::<NamedShape>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}

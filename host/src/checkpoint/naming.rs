//! Names of expert tensors, in every style that is understood, and back.

use std::fmt;

/// How the tensors of a layer's experts are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NamingStyle {
    /// `…experts.E.up_proj.{weight, weight_scale, weight_scale_2, input_scale}`; global scales are decode scales.
    ModelOpt,
    /// `…experts.E.up_proj.{weight_packed, weight_scale, weight_global_scale, input_global_scale}`; global scales
    /// are reciprocals of decode scales.
    CompressedTensors,
    /// `layers.L.ffn.experts.E.{w1, w3, w2}.…` (gate, up, down) with ModelOpt's tensor names and decode scales.
    DeepSeekV4,
}

impl fmt::Display for NamingStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ModelOpt => "ModelOpt",
            Self::CompressedTensors => "compressed-tensors",
            Self::DeepSeekV4 => "DeepSeek-V4",
        })
    }
}

/// What a stored global scale means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Convention {
    /// The decode scale itself (ModelOpt).
    Decode,
    /// Its reciprocal (compressed-tensors).
    Reciprocal,
}

/// One of an expert's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Projection {
    Gate,
    Up,
    Down,
}

impl Projection {
    pub(super) const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// The two ways in which an expert's matrices are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProjectionNames {
    /// `gate_proj`, `up_proj`, `down_proj`.
    Proj,
    /// `w1`, `w3`, `w2`.
    W,
}

impl ProjectionNames {
    pub(super) const fn name(self, projection: Projection) -> &'static str {
        match (self, projection) {
            (Self::Proj, Projection::Gate) => "gate_proj",
            (Self::Proj, Projection::Up) => "up_proj",
            (Self::Proj, Projection::Down) => "down_proj",
            (Self::W, Projection::Gate) => "w1",
            (Self::W, Projection::Up) => "w3",
            (Self::W, Projection::Down) => "w2",
        }
    }

    fn parse(name: &str) -> Option<(Self, Projection)> {
        [Self::Proj, Self::W]
            .into_iter()
            .flat_map(|names| Projection::ALL.map(|projection| (names, projection)))
            .find(|&(names, projection)| names.name(projection) == name)
    }
}

/// One stored tensor of an NVFP4 matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// E2M1 codes, two a byte, as ModelOpt names them (also the name of an unquantized weight).
    Weight,
    /// E2M1 codes, two a byte, as compressed-tensors names them.
    WeightPacked,
    /// Block scales.
    WeightScale,
    /// Global scale, decode.
    WeightScale2,
    /// Global scale, reciprocal.
    WeightGlobalScale,
    /// Activation scale, decode.
    InputScale,
    /// Activation scale, reciprocal.
    InputGlobalScale,
    /// Added to the product: not supported.
    Bias,
    /// Multiplied into the activations (AWQ): not supported.
    PreQuantScale,
}

impl Part {
    pub(super) const ALL: [Self; 9] = [
        Self::Weight,
        Self::WeightPacked,
        Self::WeightScale,
        Self::WeightScale2,
        Self::WeightGlobalScale,
        Self::InputScale,
        Self::InputGlobalScale,
        Self::Bias,
        Self::PreQuantScale,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::WeightPacked => "weight_packed",
            Self::WeightScale => "weight_scale",
            Self::WeightScale2 => "weight_scale_2",
            Self::WeightGlobalScale => "weight_global_scale",
            Self::InputScale => "input_scale",
            Self::InputGlobalScale => "input_global_scale",
            Self::Bias => "bias",
            Self::PreQuantScale => "pre_quant_scale",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.name() == name)
    }

    pub(super) const fn codes(convention: Convention) -> Self {
        match convention {
            Convention::Decode => Self::Weight,
            Convention::Reciprocal => Self::WeightPacked,
        }
    }

    pub(super) const fn weight_global(convention: Convention) -> Self {
        match convention {
            Convention::Decode => Self::WeightScale2,
            Convention::Reciprocal => Self::WeightGlobalScale,
        }
    }

    pub(super) const fn input_global(convention: Convention) -> Self {
        match convention {
            Convention::Decode => Self::InputScale,
            Convention::Reciprocal => Self::InputGlobalScale,
        }
    }
}

/// A tensor below an `experts` module of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertTensorName<'a> {
    /// The module, up to and including `experts`.
    pub(super) module: &'a str,
    /// The layer's number in that module's name.
    pub(super) layer: usize,
    /// Everything behind `experts.`.
    pub(super) rest: &'a str,
    /// What `rest` says, when it is a tensor of one numbered expert.
    pub(super) expert: Option<ExpertPart>,
}

/// Which tensor of which expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertPart {
    pub(super) expert: usize,
    pub(super) names: ProjectionNames,
    pub(super) projection: Projection,
    /// `None`: a tensor that no NVFP4 style has.
    pub(super) part: Option<Part>,
}

/// Takes a tensor name apart; `None` when it is no expert's tensor (shared experts and multi-token-prediction
/// modules beside the model's layers included).
pub(super) fn parse(name: &str) -> Option<ExpertTensorName<'_>> {
    #[cfg(test)]
    PARSED.with(|parsed| parsed.set(parsed.get() + 1));

    const EXPERTS: &str = ".experts";
    let end = name.find(".experts.")? + EXPERTS.len();
    let (module, rest) = (&name[..end], &name[end + 1..]);
    let mut layer = None;
    let mut after_layers = false;
    for component in module.split('.') {
        if component.starts_with("mtp") || component.contains("shared") {
            return None;
        }
        if layer.is_none() && after_layers {
            layer = number(component);
        }
        after_layers = component == "layers";
    }
    Some(ExpertTensorName { module, layer: layer?, rest, expert: expert_part(rest) })
}

fn expert_part(rest: &str) -> Option<ExpertPart> {
    let (expert, rest) = rest.split_once('.')?;
    let (projection, part) = rest.split_once('.')?;
    let (names, projection) = ProjectionNames::parse(projection)?;
    Some(ExpertPart { expert: number(expert)?, names, projection, part: Part::parse(part) })
}

/// A number as it is written in a name: digits, no sign, no leading zeros.
fn number(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
thread_local! {
    /// Names taken apart on this thread, so that a test can tell one pass from several.
    pub(super) static PARSED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_style_is_taken_apart() {
        for (name, module, layer, expert, projection, part) in [
            (
                "model.layers.3.mlp.experts.17.gate_proj.weight",
                "model.layers.3.mlp.experts",
                3,
                17,
                Projection::Gate,
                Part::Weight,
            ),
            (
                "model.language_model.layers.0.mlp.experts.0.down_proj.weight_global_scale",
                "model.language_model.layers.0.mlp.experts",
                0,
                0,
                Projection::Down,
                Part::WeightGlobalScale,
            ),
            (
                "layers.60.ffn.experts.383.w3.input_scale",
                "layers.60.ffn.experts",
                60,
                383,
                Projection::Up,
                Part::InputScale,
            ),
            (
                "model.layers.1.block_sparse_moe.experts.7.w2.weight_scale_2",
                "model.layers.1.block_sparse_moe.experts",
                1,
                7,
                Projection::Down,
                Part::WeightScale2,
            ),
            (
                "backbone.layers.4.mixer.experts.9.up_proj.weight_scale",
                "backbone.layers.4.mixer.experts",
                4,
                9,
                Projection::Up,
                Part::WeightScale,
            ),
        ] {
            let parsed = parse(name).unwrap();
            assert_eq!((parsed.module, parsed.layer), (module, layer), "{name}");
            let found = parsed.expert.unwrap();
            assert_eq!((found.expert, found.projection, found.part), (expert, projection, Some(part)), "{name}");
        }
    }

    #[test]
    fn other_modules_are_no_experts() {
        for name in [
            "model.layers.0.mlp.shared_experts.up_proj.weight",
            "model.layers.0.mlp.shared_expert.up_proj.weight",
            "model.layers.0.mlp.shared_experts.experts.0.up_proj.weight",
            "model.layers.0.mlp.gate.weight",
            "mtp.layers.0.mlp.experts.0.up_proj.weight",
            "mtp.0.ffn.experts.0.w1.weight",
            "model.mlp.experts.0.up_proj.weight",
            "model.layers.x.mlp.experts.0.up_proj.weight",
            "model.layers.0.experts",
            "",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    #[test]
    fn tensors_of_all_experts_together_have_no_expert() {
        for rest in ["gate_up_proj_blocks", "07.up_proj.weight", "0.fc1.weight", "-1.up_proj.weight"] {
            let name = format!("model.layers.0.mlp.experts.{rest}");
            let parsed = parse(&name).unwrap();
            assert_eq!((parsed.rest, parsed.expert), (rest, None));
        }
        let scale = parse("layers.0.ffn.experts.0.w1.scale").unwrap();
        assert_eq!(scale.expert.unwrap().part, None);
    }
}

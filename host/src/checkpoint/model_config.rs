//! What config.json says about the experts.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::CheckpointError;
use super::shards::is_listed;
use crate::activation::Activation;

/// gpt-oss' activation, whose parameters no config.json states.
const OAI_ALPHA: f32 = 1.702;
const OAI_BETA: f32 = 1.0;
const OAI_LIMIT: f32 = 7.0;

/// Sub-configurations that describe the language model of a multimodal one; they go before the top level.
const TEXT_CONFIGS: [&str; 3] = ["text_config", "language_config", "llm_config"];

const EXPERTS: [&str; 3] = ["num_local_experts", "n_routed_experts", "num_experts"];
const TOPK: [&str; 2] = ["num_experts_per_tok", "num_experts_per_token"];
/// The width of an expert's input: the model's, unless the experts work in a smaller latent space.
const HIDDEN: [&str; 2] = ["moe_latent_size", "hidden_size"];
const INTERMEDIATE: [&str; 2] = ["moe_intermediate_size", "intermediate_size"];
/// The experts' own key first: a hybrid model has other activations elsewhere.
const ACTIVATION: [&str; 3] = ["mlp_hidden_act", "hidden_act", "hidden_activation"];
const MODEL_TYPE: &str = "model_type";
const SWIGLU_LIMIT: &str = "swiglu_limit";

/// A value and the key that it was found under.
#[derive(Debug, Clone, PartialEq)]
struct Keyed<T> {
    key: &'static str,
    value: T,
}

/// The part of a model's config.json that concerns its experts. What it does not say is `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    model_type: Option<Keyed<String>>,
    experts: Option<Keyed<usize>>,
    topk: Option<Keyed<usize>>,
    hidden: Option<Keyed<usize>>,
    intermediate: Option<Keyed<usize>>,
    activation: Option<Keyed<String>>,
    swiglu_limit: Option<Keyed<f32>>,
}

impl ModelConfig {
    /// Reads a config.json; `None` when there is no such file.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], [`CheckpointError::BadJson`], or [`CheckpointError::BadConfig`] for a key of the
    /// wrong type.
    pub fn read(path: &Path) -> Result<Option<Self>, CheckpointError> {
        if !is_listed(path)? {
            return Ok(None);
        }
        let text = std::fs::read(path).map_err(CheckpointError::io(path, "read"))?;
        let root: Value = serde_json::from_slice(&text)
            .map_err(|source| CheckpointError::BadJson { path: path.to_owned(), source })?;
        let Value::Object(root) = root else {
            return Err(CheckpointError::BadConfig {
                path: path.to_owned(),
                key: "the whole file",
                found: brief(&root),
                must: "a JSON object",
            });
        };
        let texts = TEXT_CONFIGS.iter().filter_map(|key| root.get(*key)?.as_object());
        let source = Source { path: path.to_owned(), objects: texts.chain([&root]).collect() };
        Ok(Some(Self {
            model_type: source.text(&[MODEL_TYPE])?,
            experts: source.count(&EXPERTS)?,
            topk: source.count(&TOPK)?,
            hidden: source.count(&HIDDEN)?,
            intermediate: source.count(&INTERMEDIATE)?,
            activation: source.text(&ACTIVATION)?,
            swiglu_limit: source.number(SWIGLU_LIMIT)?,
        }))
    }

    /// The model's type, such as `deepseek_v3`.
    #[must_use]
    pub fn model_type(&self) -> Option<&str> {
        self.model_type.as_ref().map(|k| k.value.as_str())
    }

    /// Routed experts of a layer.
    #[must_use]
    pub fn experts(&self) -> Option<usize> {
        self.experts.as_ref().map(|k| k.value)
    }

    /// Experts that the router picks for each token.
    #[must_use]
    pub fn topk(&self) -> Option<usize> {
        self.topk.as_ref().map(|k| k.value)
    }

    /// Elements of an expert's input.
    #[must_use]
    pub fn hidden(&self) -> Option<usize> {
        self.hidden.as_ref().map(|k| k.value)
    }

    /// Elements between an expert's two matrix products.
    #[must_use]
    pub fn intermediate(&self) -> Option<usize> {
        self.intermediate.as_ref().map(|k| k.value)
    }

    /// The limit of the experts' clamp.
    #[must_use]
    pub fn swiglu_limit(&self) -> Option<f32> {
        self.swiglu_limit.as_ref().map(|k| k.value)
    }

    /// The experts' activation; where the file does not say, SwiGLU with a gate and ReLU^2 without.
    ///
    /// # Errors
    /// [`CheckpointError::UnsupportedActivation`] or [`CheckpointError::BadActivation`].
    pub fn activation(&self, gated: bool) -> Result<Activation, CheckpointError> {
        let limit = self.swiglu_limit.as_ref().map(|k| k.value);
        let oai = Activation::SwiGluOai { alpha: OAI_ALPHA, beta: OAI_BETA, limit: limit.unwrap_or(OAI_LIMIT) };
        let activation = match &self.activation {
            _ if self.model_type() == Some("gpt_oss") => oai,
            None if gated => Activation::SwiGlu { limit },
            None => Activation::Relu2,
            Some(Keyed { key, value }) => match value.as_str() {
                "silu" | "swish" => Activation::SwiGlu { limit },
                "swigluoai" => oai,
                "relu2" => Activation::Relu2,
                _ => {
                    return Err(CheckpointError::UnsupportedActivation { key, found: value.clone() });
                }
            },
        };
        Ok(activation.validated()?)
    }

    /// As [`Self::activation`], checked against the projections that the layer's experts have.
    pub(super) fn activation_of(&self, layer: usize, gated: bool) -> Result<Activation, CheckpointError> {
        let activation = self.activation(gated)?;
        if activation.is_gated() == gated {
            return Ok(activation);
        }
        let tensors = if gated { "experts with a gate projection" } else { "experts without a gate projection" };
        let said = self.activation.as_ref().or(self.model_type.as_ref());
        Err(CheckpointError::ConfigMismatch {
            layer,
            key: said.map_or(MODEL_TYPE, |k| k.key),
            config: said.map_or_else(|| activation.to_string(), |k| k.value.clone()),
            tensors: tensors.to_owned(),
        })
    }

    pub(super) fn experts_key(&self) -> &'static str {
        self.experts.as_ref().map_or(EXPERTS[0], |k| k.key)
    }

    /// Checks a layer's number of experts against how many of them a token picks.
    pub(super) fn check_topk(&self, layer: usize, experts: usize) -> Result<(), CheckpointError> {
        match self.topk {
            Some(Keyed { key, value: topk }) if !(1..=experts).contains(&topk) => {
                Err(CheckpointError::BadTopk { layer, key, topk, experts })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_sizes(&self, layer: usize, hidden: usize, intermediate: usize) -> Result<(), CheckpointError> {
        for (said, found) in [(&self.hidden, hidden), (&self.intermediate, intermediate)] {
            if let Some(Keyed { key, value }) = said
                && *value != found
            {
                return Err(CheckpointError::ConfigMismatch {
                    layer,
                    key,
                    config: value.to_string(),
                    tensors: found.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// The objects of a config.json in the order in which they are asked.
struct Source<'a> {
    path: PathBuf,
    objects: Vec<&'a Map<String, Value>>,
}

impl<'a> Source<'a> {
    /// The first of `keys` that any object has. null and lists that differ from layer to layer say nothing.
    fn find(&self, keys: &[&'static str]) -> Option<Keyed<&'a Value>> {
        for object in &self.objects {
            for key in keys {
                let value = match object.get(*key) {
                    None | Some(Value::Null) => continue,
                    Some(Value::Array(per_layer)) => match per_layer.as_slice() {
                        [first, rest @ ..] if rest.iter().all(|v| v == first) => first,
                        _ => continue,
                    },
                    Some(value) => value,
                };
                return Some(Keyed { key, value });
            }
        }
        None
    }

    fn count(&self, keys: &[&'static str]) -> Result<Option<Keyed<usize>>, CheckpointError> {
        self.convert(self.find(keys), "a whole number, not negative", |value| usize::try_from(value.as_u64()?).ok())
    }

    fn number(&self, key: &'static str) -> Result<Option<Keyed<f32>>, CheckpointError> {
        self.convert(self.find(&[key]), "a number", |value| Some(value.as_f64()? as f32))
    }

    fn text(&self, keys: &[&'static str]) -> Result<Option<Keyed<String>>, CheckpointError> {
        self.convert(self.find(keys), "a string", |value| value.as_str().map(str::to_owned))
    }

    fn convert<T>(
        &self,
        found: Option<Keyed<&Value>>,
        must: &'static str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<Keyed<T>>, CheckpointError> {
        let Some(Keyed { key, value }) = found else {
            return Ok(None);
        };
        match convert(value) {
            Some(value) => Ok(Some(Keyed { key, value })),
            None => Err(CheckpointError::BadConfig { path: self.path.clone(), key, found: brief(value), must }),
        }
    }
}

/// A value as JSON, cut where it gets long.
fn brief(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

//! NVFP4 checkpoints in safetensors format, as ModelOpt and llm-compressor export them.
//!
//! [`Checkpoint::open`] maps the files, reads their headers once, finds the experts of every layer by their tensors'
//! names, and checks every dtype and shape. Tensor data stays in the map until [`LayerView::expert`] hands out
//! slices of it, so that opening costs the same for one layer as for a terabyte.
//!
//! ```no_run
//! use nvfp4_moe::checkpoint::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("path/to/model")?;
//! for info in checkpoint.layers() {
//!     println!("layer {}: {} experts, {}", info.index, info.experts, info.format);
//! }
//! let layer = checkpoint.layer(checkpoint.layers()[0].index)?;
//! let expert = layer.expert(0)?;
//! assert_eq!(expert.up.codes.len(), layer.intermediate() * layer.hidden() / 2);
//! # Ok::<(), nvfp4_moe::checkpoint::CheckpointError>(())
//! ```

mod collect;
mod error;
mod expert;
mod header;
mod inputs;
mod inspect;
mod layers;
mod model_config;
mod naming;
mod shards;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use error::CheckpointError;
pub use expert::{LayerView, Origin, RawExpert, RawMatrix, StaticScales};
pub use inputs::{HiddenStates, LayerInputs, OutputData, check_output, write_output};
pub use inspect::{ExpertFormat, InputScales, LayerInfo};
pub use model_config::ModelConfig;
pub use naming::NamingStyle;

use crate::activation::Activation;
use collect::LayerBuilder;
use layers::Layer;
use shards::Shards;

const CONFIG_FILE: &str = "config.json";

/// An open checkpoint: mapped files and the table of their experts.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    shards: Shards,
    config: Option<ModelConfig>,
    /// Ascending by index; `infos` goes with it.
    layers: Vec<Layer>,
    infos: Vec<LayerInfo>,
}

impl Checkpoint {
    /// Opens a directory (the shards of `model.safetensors.index.json`, else `model.safetensors`, else every
    /// `*.safetensors`) or one safetensors file, with the config.json beside it if there is one. Files are only
    /// read.
    ///
    /// The files must not be shortened or rewritten while the checkpoint is open: they are memory-mapped, and a
    /// read past a new end kills the process.
    ///
    /// # Errors
    /// A [`CheckpointError`] that names the file or tensor: files that are missing, truncated or no safetensors,
    /// experts with missing tensors, wrong dtypes or wrong shapes, or a config.json that disagrees with them.
    /// Values of global scales are checked by [`LayerView::expert`]; layers in other formats are listed, and are an
    /// error in [`Self::layer`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let config_file = if path.is_dir() { path.join(CONFIG_FILE) } else { path.with_file_name(CONFIG_FILE) };
        let mut builder = LayerBuilder::default();
        let shards = Shards::open(path, |name, id, entry| builder.add(name, id, entry))?;
        let config = ModelConfig::read(&config_file)?;
        let layers = builder.finish(&shards, config.as_ref())?;
        if layers.is_empty() {
            return Err(CheckpointError::NoMoeLayers { path: path.to_owned(), tensors: shards.tensors() });
        }
        let infos = layers.iter().map(|layer| LayerInfo::of(layer, &shards)).collect();
        Ok(Self { path: path.to_owned(), shards, config, layers, infos })
    }

    /// The path that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What config.json says; `None` without one.
    #[must_use]
    pub fn config(&self) -> Option<&ModelConfig> {
        self.config.as_ref()
    }

    /// Experts per token, as config.json says.
    #[must_use]
    pub fn topk(&self) -> Option<usize> {
        self.config.as_ref()?.topk()
    }

    /// Number of safetensors files.
    #[must_use]
    pub fn files(&self) -> usize {
        self.shards.paths().len()
    }

    /// The safetensors files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.paths()
    }

    /// Number of tensors in them, experts' or not.
    #[must_use]
    pub fn tensors(&self) -> usize {
        self.shards.tensors()
    }

    /// The layers that have experts, ascending; at least one.
    #[must_use]
    pub fn layers(&self) -> &[LayerInfo] {
        &self.infos
    }

    /// An NVFP4 layer by its number in the model.
    ///
    /// # Errors
    /// [`CheckpointError::LayerNotFound`], [`CheckpointError::NotNvfp4`], an activation that is not supported or
    /// does not go with the layer's tensors, or [`CheckpointError::UnsupportedTensor`].
    pub fn layer(&self, index: usize) -> Result<LayerView<'_>, CheckpointError> {
        self.view(index, |layer| match &self.config {
            Some(config) => config.activation_of(index, layer.gated),
            None if layer.gated => Ok(Activation::SwiGlu { limit: None }),
            None => Ok(Activation::Relu2),
        })
    }

    /// As [`Self::layer`], with this activation whatever config.json says. Whether it goes with the layer's tensors
    /// turns out when experts are loaded.
    ///
    /// # Errors
    /// As [`Self::layer`], but for the activation only [`CheckpointError::BadActivation`].
    pub fn layer_with_activation(
        &self,
        index: usize,
        activation: Activation,
    ) -> Result<LayerView<'_>, CheckpointError> {
        self.view(index, |_| Ok(activation.validated()?))
    }

    fn view(
        &self,
        index: usize,
        activation: impl FnOnce(&Layer) -> Result<Activation, CheckpointError>,
    ) -> Result<LayerView<'_>, CheckpointError> {
        let at = self.layers.binary_search_by_key(&index, |layer| layer.index).map_err(|_| {
            CheckpointError::LayerNotFound { layer: index, have: ranges(self.layers.iter().map(|layer| layer.index)) }
        })?;
        let layer = &self.layers[at];
        let convention =
            layer.convention.ok_or_else(|| CheckpointError::NotNvfp4 { layer: index, found: layer.found.clone() })?;
        layer.check_supported()?;
        let activation = activation(layer)?;
        Ok(LayerView { checkpoint: self, layer, info: &self.infos[at], convention, activation })
    }
}

/// Ascending numbers as ranges: `0, 3..=5`.
fn ranges(numbers: impl IntoIterator<Item = usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let texts: Vec<_> = runs
        .into_iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}..={last}") })
        .collect();
    texts.join(", ")
}

//! Everything that can be wrong with a checkpoint or an input file, each as a sentence that says what was found,
//! what was expected and what to do.

use std::path::PathBuf;

use safetensors::Dtype;
use thiserror::Error;

use crate::activation::ActivationError;
use crate::shape::ShapeError;

/// Why a checkpoint, or the file with a layer's inputs, cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused an operation on a file.
    #[error("cannot {action} {}: {source}; check the path, its permissions and free space", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A directory without any safetensors file.
    #[error("{} holds no .safetensors file; give the directory of a model in safetensors format", path.display())]
    NoSafetensors {
        /// The directory.
        path: PathBuf,
    },
    /// A safetensors file that ends before its header says.
    #[error(
        "{} is truncated: its header calls for {expected} bytes, the file has {found}; fetch it again", path.display()
    )]
    TruncatedFile {
        /// The file.
        path: PathBuf,
        /// Bytes that the file must have (8 when not even the header's length is there).
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A safetensors file whose header cannot be understood.
    #[error("{} is not a valid safetensors file: {reason}; fetch or export it again", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor whose byte range does not fit its dtype and shape.
    #[error(
        "tensor {tensor} in {} must have {expected} bytes by its dtype and shape, but its byte range has {found}; \
         export the file again", path.display()
    )]
    WrongByteCount {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Bytes by dtype and shape.
        expected: u64,
        /// Bytes of its range in the header.
        found: u64,
    },
    /// config.json or the shard index is not JSON.
    #[error("{} is not valid JSON: {source}; fetch it again", path.display())]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The shard index is JSON, but not an index.
    #[error("{} is not a shard index: {reason}; fetch it again", path.display())]
    BadIndex {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A key of config.json has an unusable value.
    #[error("{} has {key} = {found}, but it must be {must}; correct it there", path.display())]
    BadConfig {
        /// The config file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value as JSON.
        found: String,
        /// What is allowed.
        must: &'static str,
    },
    /// A shard that should be there is not.
    #[error("{} names the shard {shard}, but there is no such file beside it; fetch the missing shard", named_by.display())]
    MissingShard {
        /// The index, or the sibling shard whose file name counts it.
        named_by: PathBuf,
        /// The missing file.
        shard: String,
    },
    /// Two files hold a tensor of the same name.
    #[error(
        "tensor {tensor} is in both {} and {}; remove one of them, or add the model.safetensors.index.json that \
         says which one counts", first.display(), second.display()
    )]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// The file read first.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// No tensor is named like an expert's.
    #[error(
        "{} has no Mixture-of-Experts layer among its {tensors} tensors: expected names such as \
         model.layers.0.mlp.experts.0.up_proj.weight or layers.0.ffn.experts.0.w1.weight; give a model with experts",
        path.display()
    )]
    NoMoeLayers {
        /// The checkpoint.
        path: PathBuf,
        /// Tensors it has.
        tensors: usize,
    },
    /// Two modules claim to be the experts of one layer.
    #[error("layer {layer} has experts under both {first} and {second}; keep the files of one model only")]
    AmbiguousLayer {
        /// The layer.
        layer: usize,
        /// One module.
        first: String,
        /// The other one.
        second: String,
    },
    /// The layer asked for has no experts.
    #[error("layer {layer} has no experts here; choose a layer with experts: {have}")]
    LayerNotFound {
        /// The layer asked for.
        layer: usize,
        /// The layers there are, as ranges.
        have: String,
    },
    /// The expert asked for is not in the layer.
    #[error("layer {layer} has no expert {expert}; choose one of its {have}, numbered from 0")]
    ExpertNotFound {
        /// The layer.
        layer: usize,
        /// The expert asked for.
        expert: usize,
        /// Experts of the layer.
        have: usize,
    },
    /// An expert without any tensor.
    #[error(
        "expert {expert} of layer {layer} is missing: there is no tensor {tensor}; {have} experts were found, expected \
         {expected} ({because}); fetch the shard that holds it"
    )]
    MissingExpert {
        /// The layer.
        layer: usize,
        /// The first missing expert.
        expert: usize,
        /// The first of its tensors.
        tensor: String,
        /// Experts of the layer with at least one tensor.
        have: usize,
        /// Experts it must have.
        expected: usize,
        /// Where that number comes from.
        because: &'static str,
    },
    /// An expert with some of its tensors.
    #[error("tensor {tensor} is missing: expert {expert} of layer {layer} must have it; fetch the shard that holds it")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
    },
    /// A tensor that the index lists is not in its shard.
    #[error("tensor {tensor} is missing: {} says that it is in {shard}, which does not hold it; fetch both again", index.display())]
    MissingFromShard {
        /// The tensor.
        tensor: String,
        /// The index.
        index: PathBuf,
        /// The shard named there.
        shard: String,
    },
    /// Layers with different numbers of experts, and no config.json that says which number is right.
    #[error(
        "layer {layer} has {found} experts, but layer {other_layer} has {expected}; fetch the missing shards, or add \
         config.json if the layers do differ"
    )]
    UnevenExperts {
        /// The layer with fewer.
        layer: usize,
        /// Its experts.
        found: usize,
        /// A layer with more.
        other_layer: usize,
        /// The experts of that layer.
        expected: usize,
    },
    /// A tensor of another element type.
    #[error("tensor {tensor} must be {expected}, but is {found}; export its file again")]
    WrongDtype {
        /// The tensor.
        tensor: String,
        /// What is allowed.
        expected: &'static str,
        /// What is there.
        found: Dtype,
    },
    /// A tensor of another shape.
    #[error("tensor {tensor} must have the shape {expected} ({meaning}), but has {found:?}; export its file again")]
    WrongShape {
        /// The tensor.
        tensor: String,
        /// The shape that fits the other tensors.
        expected: String,
        /// What the axes are.
        meaning: &'static str,
        /// The shape found.
        found: Vec<usize>,
    },
    /// A global scale that gives no usable number.
    #[error("tensor {tensor} is {value:?}, but must be {must}; calibrate and export the checkpoint again")]
    BadScale {
        /// The scale tensor.
        tensor: String,
        /// Its value as stored.
        value: f32,
        /// What is allowed.
        must: &'static str,
    },
    /// A block-scale byte that is negative or NaN.
    #[error(
        "tensor {tensor} has the byte {byte:#04x} at row {row}, block {block}, but a block scale must be 0x00..0x7e \
         (E4M3, not negative, not NaN); export the checkpoint again"
    )]
    BadScaleByte {
        /// The block-scale tensor.
        tensor: String,
        /// Its row.
        row: usize,
        /// Its column: block of 16 elements along K.
        block: usize,
        /// The byte.
        byte: u8,
    },
    /// A size that NVFP4 cannot have.
    #[error("layer {layer}: {source}")]
    Shape {
        /// The layer.
        layer: usize,
        /// Which size, its value and what is allowed.
        source: ShapeError,
    },
    /// Experts in another format.
    #[error(
        "the experts of layer {layer} are not NVFP4: found {found}; expected U8 codes, F8_E4M3 block scales of 16 and an \
         F32 global scale per tensor; quantize the experts to NVFP4 with ModelOpt or llm-compressor"
    )]
    NotNvfp4 {
        /// The layer.
        layer: usize,
        /// What the tensors are.
        found: String,
    },
    /// More experts a token than there are, or none.
    #[error(
        "config.json says {key} = {topk}, but layer {layer} has {experts} experts, so it must be 1 to {experts}; correct it \
         there, or use the config.json that belongs to these files"
    )]
    BadTopk {
        /// The layer.
        layer: usize,
        /// The key of config.json.
        key: &'static str,
        /// Its value.
        topk: usize,
        /// Experts of the layer.
        experts: usize,
    },
    /// config.json and the tensors disagree.
    #[error(
        "config.json says {key} = {config}, but the tensors of layer {layer} say {tensors}; use the config.json that \
         belongs to these files"
    )]
    ConfigMismatch {
        /// The layer.
        layer: usize,
        /// The key of config.json.
        key: &'static str,
        /// Its value.
        config: String,
        /// What the tensors say.
        tensors: String,
    },
    /// An activation that the kernels do not have.
    #[error(
        "config.json says {key} = {found:?}, which is not supported; supported are silu, swish, swigluoai and relu2: if the \
         model's is one of them under another name, choose it with --activation"
    )]
    UnsupportedActivation {
        /// The key of config.json.
        key: &'static str,
        /// Its value.
        found: String,
    },
    /// An activation with an unusable parameter.
    #[error(transparent)]
    BadActivation(#[from] ActivationError),
    /// A tensor that changes the result and that is not implemented.
    #[error(
        "tensor {tensor} is not supported: {why}, and ignoring it would give wrong results; export the checkpoint without it"
    )]
    UnsupportedTensor {
        /// The tensor.
        tensor: String,
        /// What it would do.
        why: &'static str,
    },
    /// Static activation scales are wanted, but an expert has none.
    #[error(
        "static activation scales need the tensor {tensor}, which is missing; use per-token activation scales, or \
         calibrate the checkpoint"
    )]
    StaticScalesMissing {
        /// The first missing scale tensor.
        tensor: String,
    },
    /// An input file without a tensor that is needed.
    #[error("{} has no tensor {tensor}, but has {have}; name one of these, or give another file", path.display())]
    MissingInput {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The names there are.
        have: String,
    },
    /// An expert id that does not fit into 32 bits.
    #[error(
        "tensor {tensor} has {value} at token {token}, choice {choice}, but expert ids must fit into a signed \
         32-bit integer; correct it there"
    )]
    IdOutOfRange {
        /// The tensor.
        tensor: String,
        /// Row.
        token: usize,
        /// Column.
        choice: usize,
        /// The id.
        value: i64,
    },
    /// An expert id beyond the layer.
    #[error(
        "{tensor} of {} has expert {id} at token {token}, choice {choice}, but the layer has {experts} experts, numbered \
         from 0; give inputs made for this layer, with -1 for choices to skip, or fetch the experts that are missing",
        path.display()
    )]
    NoSuchExpert {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Row.
        token: usize,
        /// Column.
        choice: usize,
        /// The id.
        id: i32,
        /// Experts of the layer.
        experts: usize,
    },
    /// Output data that does not fill its shape.
    #[error(
        "output tensor {tensor} has the shape {shape:?}, but {elements} elements were given; pass the shape of the data"
    )]
    WrongOutput {
        /// The tensor to write.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements given.
        elements: usize,
    },
}

impl CheckpointError {
    pub(super) fn io(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, action, source }
    }
}

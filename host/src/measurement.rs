//! What `nvfp4-moe bench` measured, and what its peers took, as JSON: written by the program, read by `cargo xtask`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// [`Measurement::format`].
pub const BENCH_FORMAT: &str = "nvfp4-moe bench 1";
/// [`Peers::format`].
pub const PEERS_FORMAT: &str = "nvfp4-moe peers 1";

/// A file that holds no usable measurement.
#[derive(Debug, Error)]
pub enum MeasurementError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}; check the path", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Its `format` is another one.
    #[error("{} has the format {found}, expected {expected:?}; make it with {made_by}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
        /// What it should say.
        expected: &'static str,
        /// What writes such files.
        made_by: &'static str,
    },
    /// It is no JSON, or a field is missing or of another kind.
    #[error("{} is damaged: {error}; make it again with {made_by}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where, and what was expected.
        error: serde_json::Error,
        /// What writes such files.
        made_by: &'static str,
    },
    /// A number that cannot have been measured.
    #[error("{} has {field} = {got}, but it must be a finite number above 0; make it again with {made_by}", .path.display())]
    Number {
        /// The file.
        path: PathBuf,
        /// Which number.
        field: String,
        /// Its value.
        got: f64,
        /// What writes such files.
        made_by: &'static str,
    },
}

/// One run of `nvfp4-moe bench`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// [`BENCH_FORMAT`].
    pub format: String,
    /// Version of this crate.
    pub version: String,
    /// The code that was measured.
    pub checkout: Checkout,
    /// Where.
    pub machine: Machine,
    /// What the machine can do at best.
    pub ceilings: Ceilings,
    /// Activation scale mode.
    pub scales: String,
    /// What was measured.
    pub shapes: Vec<ShapeTimes>,
}

/// A git checkout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkout {
    /// Null outside a git checkout.
    pub commit: Option<String>,
    /// Whether files differ from that commit.
    pub changed: bool,
}

impl Checkout {
    /// The checkout that `directory` is in.
    #[must_use]
    pub fn of(directory: &Path) -> Self {
        let git = |arguments: &[&str]| {
            let output = Command::new("git").current_dir(directory).args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let commit = git(&["rev-parse", "HEAD"]);
        let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
        Self { commit, changed: changes.is_some_and(|text| !text.is_empty()) }
    }
}

/// The device that ran the layer; what only a GPU has is null on the CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// In words.
    pub name: String,
    /// Why this device.
    pub reason: String,
    /// The GPU's name alone.
    pub gpu: Option<String>,
    /// The driver's own version; null where it does not tell.
    pub driver: Option<String>,
    /// Newest CUDA version that the driver supports.
    pub driver_cuda: Option<String>,
    /// Such as `9.0`.
    pub compute_capability: Option<String>,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Which kernels ran.
    pub kernels: Option<String>,
}

/// What the machine can do at best, measured in the same call, or given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Reading memory.
    pub read_gb_per_s: f64,
    /// Copying from memory to memory: bytes read and bytes written.
    pub copy_gb_per_s: f64,
    /// A large dense bf16 product; null if nobody gave it.
    pub matmul_tflop_per_s: Option<f64>,
}

/// The layer's sizes and times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShapeTimes {
    /// Name, as `--shape` takes it.
    pub shape: String,
    /// Elements of a token.
    pub hidden: usize,
    /// Elements between the two products.
    pub intermediate: usize,
    /// Experts of the rank.
    pub experts: usize,
    /// Experts of a token.
    pub topk: usize,
    /// In words.
    pub activation: String,
    /// One number of tokens each.
    pub rows: Vec<Row>,
}

/// One number of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Tokens of the batch.
    pub tokens: usize,
    /// The grouped GEMM that ran; null on the CPU.
    pub variant: Option<String>,
    /// Median.
    pub layer_us: f64,
    /// Fastest and slowest.
    pub layer_us_range: [f64; 2],
    /// Stages in order; none where only the whole was timed.
    pub stages: Vec<StageTime>,
    /// Bytes of codes and block scales of the experts that got a token, on average over the batches.
    pub touched_bytes: f64,
    /// Of the matrix products.
    pub flops: f64,
    /// Least times.
    pub floors: Floors,
    /// Samples that the median is of.
    pub samples: usize,
    /// Batches that took turns.
    pub batches: usize,
    /// Copies of the weights that took turns.
    pub copies: usize,
    /// Relative L2 distance from the CPU engine in a sample of rows; null if it was not computed.
    pub check_rel_l2: Option<f64>,
    /// Whether that is within the tolerance; null without it.
    pub check_passed: Option<bool>,
}

/// One stage of the layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageTime {
    /// Label.
    pub stage: String,
    /// Median, with a launch.
    pub us: f64,
    /// Bytes that it must read and write; null where memory is not what bounds it.
    pub moved_bytes: Option<u64>,
    /// Those bytes in that time.
    pub gb_per_s: Option<f64>,
    /// The same as a part of the copy ceiling.
    pub of_copy: Option<f64>,
}

/// Least times that the ceilings allow for, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floors {
    /// Reading the touched weights.
    pub read_us: f64,
    /// The products; null without a dense rate.
    pub matmul_us: Option<f64>,
}

impl Floors {
    /// Of a layer that reads `touched_bytes` and computes `flops`.
    #[must_use]
    pub fn new(touched_bytes: f64, flops: f64, ceilings: &Ceilings) -> Self {
        Self {
            read_us: touched_bytes / (ceilings.read_gb_per_s * 1e3),
            matmul_us: ceilings.matmul_tflop_per_s.map(|rate| flops / (rate * 1e6)),
        }
    }

    /// The larger one.
    #[must_use]
    pub fn us(&self) -> f64 {
        self.matmul_us.map_or(self.read_us, |matmul| matmul.max(self.read_us))
    }
}

impl Row {
    /// Touched bytes in the layer's time.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        self.touched_bytes / (self.layer_us * 1e3)
    }

    /// FLOPs in the layer's time.
    #[must_use]
    pub fn tflop_per_s(&self) -> f64 {
        self.flops / (self.layer_us * 1e6)
    }

    /// Part of the read ceiling that the layer reaches.
    #[must_use]
    pub fn of_read(&self) -> f64 {
        self.floors.read_us / self.layer_us
    }

    /// Part of the dense rate that the layer reaches; none without a dense rate.
    #[must_use]
    pub fn of_matmul(&self) -> Option<f64> {
        self.floors.matmul_us.map(|us| us / self.layer_us)
    }

    /// Part of the larger floor in the layer's time: 1 is the best there can be.
    #[must_use]
    pub fn of_floor(&self) -> f64 {
        self.floors.us() / self.layer_us
    }
}

/// What `tests/peers/peers.py` measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peers {
    /// [`PEERS_FORMAT`].
    pub format: String,
    /// The GPU's name.
    pub gpu: String,
    /// bf16, 8192 x 8192 x 8192; null if it was not measured.
    pub matmul_tflop_per_s: Option<MatmulRate>,
    /// Libraries.
    pub peers: Vec<Peer>,
}

/// A dense product's rate over many runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatmulRate {
    /// Of the fastest run: the ceiling.
    pub best: f64,
    /// Of the median run.
    pub median: f64,
}

/// Another library's layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// In tables.
    pub name: String,
    /// Its package and version.
    pub version: String,
    /// Medians.
    pub rows: Vec<PeerRow>,
}

/// One number of tokens of one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRow {
    /// As in [`ShapeTimes::shape`].
    pub shape: String,
    /// Tokens of the batch.
    pub tokens: usize,
    /// Median of the whole layer.
    pub layer_us: f64,
}

impl Peer {
    /// The layer's time, if it was measured.
    #[must_use]
    pub fn layer_us(&self, shape: &str, tokens: usize) -> Option<f64> {
        self.rows.iter().find(|row| row.shape == shape && row.tokens == tokens).map(|row| row.layer_us)
    }
}

const BENCH_MADE_BY: &str = "nvfp4-moe bench --json";
const PEERS_MADE_BY: &str = "tests/peers/peers.py";

impl Measurement {
    /// Reads what `nvfp4-moe bench --json` printed.
    ///
    /// # Errors
    /// [`MeasurementError`].
    pub fn read(path: &Path) -> Result<Self, MeasurementError> {
        let measured: Self = read(path, BENCH_FORMAT, BENCH_MADE_BY)?;
        let positive = |field: String, got| positive(path, BENCH_MADE_BY, field, got);
        let ceilings = &measured.ceilings;
        positive("read_gb_per_s".to_owned(), ceilings.read_gb_per_s)?;
        positive("copy_gb_per_s".to_owned(), ceilings.copy_gb_per_s)?;
        positive("matmul_tflop_per_s".to_owned(), ceilings.matmul_tflop_per_s.unwrap_or(1.0))?;
        for ShapeTimes { shape, rows, .. } in &measured.shapes {
            for row in rows {
                let at = |field: &str| format!("{field} of {shape} with {} tokens", row.tokens);
                positive(at("tokens"), row.tokens as f64)?;
                positive(at("layer_us"), row.layer_us)?;
                positive(at("touched_bytes"), row.touched_bytes)?;
                positive(at("flops"), row.flops)?;
            }
        }
        Ok(measured)
    }

    /// Sets the dense rate, and the floors that follow from it.
    pub fn set_matmul_rate(&mut self, tflop_per_s: f64) {
        self.ceilings.matmul_tflop_per_s = Some(tflop_per_s);
        for row in self.shapes.iter_mut().flat_map(|shape| &mut shape.rows) {
            row.floors = Floors::new(row.touched_bytes, row.flops, &self.ceilings);
        }
    }
}

impl Peers {
    /// Reads what `tests/peers/peers.py` wrote.
    ///
    /// # Errors
    /// [`MeasurementError`].
    pub fn read(path: &Path) -> Result<Self, MeasurementError> {
        let peers: Self = read(path, PEERS_FORMAT, PEERS_MADE_BY)?;
        let positive = |field: String, got| positive(path, PEERS_MADE_BY, field, got);
        if let Some(rate) = peers.matmul_tflop_per_s {
            positive("matmul_tflop_per_s".to_owned(), rate.best)?;
        }
        for Peer { name, rows, .. } in &peers.peers {
            for PeerRow { shape, tokens, layer_us } in rows {
                positive(format!("layer_us of {name}, {shape} with {tokens} tokens"), *layer_us)?;
            }
        }
        Ok(peers)
    }
}

fn read<T: DeserializeOwned>(
    path: &Path,
    expected: &'static str,
    made_by: &'static str,
) -> Result<T, MeasurementError> {
    let text = fs::read(path).map_err(|error| MeasurementError::Unreadable { path: path.to_owned(), error })?;
    let damaged = |error| MeasurementError::Damaged { path: path.to_owned(), error, made_by };
    let value: Value = serde_json::from_slice(&text).map_err(damaged)?;
    if value["format"] != expected {
        let found = value.get("format").map_or_else(|| "of no name".to_owned(), Value::to_string);
        return Err(MeasurementError::Format { path: path.to_owned(), found, expected, made_by });
    }
    // Again from the text: then an error says in which line.
    serde_json::from_slice(&text).map_err(damaged)
}

fn positive(path: &Path, made_by: &'static str, field: String, got: f64) -> Result<(), MeasurementError> {
    // NaN is refused too, though JSON has none.
    if got > 0.0 && got.is_finite() {
        return Ok(());
    }
    Err(MeasurementError::Number { path: path.to_owned(), field, got, made_by })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    fn peers(text: &str) -> Result<Peers, String> {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("peers.json");
        fs::write(&path, text).unwrap();
        Peers::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let of = |row: &Value| {
            let peers = [json!({"name": "A", "version": "a 1", "rows": [row]})];
            json!({"format": PEERS_FORMAT, "gpu": "B", "matmul_tflop_per_s": null, "peers": peers}).to_string()
        };
        let good = peers(&of(&json!({"shape": "s", "tokens": 4, "layer_us": 2.5}))).unwrap();
        assert_eq!(good.peers[0].layer_us("s", 4), Some(2.5));
        assert_eq!((good.peers[0].layer_us("s", 8), good.peers[0].layer_us("t", 4)), (None, None));
        for (text, parts) in [
            ("{", ["peers.json is damaged", "EOF", "peers.py"]),
            ("[]", ["format of no name", PEERS_FORMAT, "peers.py"]),
            (r#"{"format": "other"}"#, [r#"format "other""#, PEERS_FORMAT, "peers.py"]),
            (&of(&json!({"shape": "s", "tokens": 4})), ["damaged", "layer_us", "line 1"]),
            (
                &of(&json!({"shape": "s", "tokens": 4, "layer_us": 0.0})),
                ["layer_us of A, s with 4 tokens = 0", "above 0", "peers.py"],
            ),
        ] {
            let error = peers(text).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} are not in: {error}");
        }
        let error = Measurement::read(Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(error.contains("cannot read /no/such/file") && error.contains("check the path"), "{error}");
    }

    #[test]
    fn the_larger_floor_counts() {
        let mut ceilings = Ceilings { read_gb_per_s: 1000.0, copy_gb_per_s: 900.0, matmul_tflop_per_s: None };
        assert_eq!(Floors::new(5e6, 8e9, &ceilings), Floors { read_us: 5.0, matmul_us: None });
        assert_eq!(Floors::new(5e6, 8e9, &ceilings).us(), 5.0);
        ceilings.matmul_tflop_per_s = Some(500.0);
        assert_eq!(Floors::new(5e6, 8e9, &ceilings).us(), 16.0);
        assert_eq!(Floors::new(50e6, 8e9, &ceilings).us(), 50.0);
    }

    #[test]
    fn a_directory_outside_a_checkout_has_no_commit() {
        let directory = TempDir::new().unwrap();
        assert_eq!(Checkout::of(directory.path()), Checkout::default());
        let here = Checkout::of(Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(here.commit.is_none_or(|commit| commit.len() >= 40));
    }
}

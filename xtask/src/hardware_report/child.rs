//! Programs that run beside this one: on hardware that nobody has tried, a kernel may hang or take the process with it,
//! and the report must come out nevertheless.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;

/// Lines of stderr that are kept: the last ones say where it ended.
const KEPT_LINES: usize = 40;

const POLL: Duration = Duration::from_millis(100);

/// How a program ended, and what it reported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Ran {
    /// As one would type it.
    pub(super) command: String,
    pub(super) passed: bool,
    /// In words.
    pub(super) ended: String,
    pub(super) seconds: f64,
    /// The JSON that it printed; null if it printed none.
    pub(super) report: Value,
    /// The end of what it said beside that.
    pub(super) said: Vec<String>,
}

/// Runs `program` with what it says in files of `dir`, for at most `limit`.
pub(super) fn run(program: &Path, arguments: &[&str], dir: &Path, limit: Duration) -> Result<Ran> {
    let name = program.file_stem().unwrap_or_default().to_string_lossy();
    let command = format!("{name} {}", arguments.join(" "));
    eprintln!("$ {command}");
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // Files, not pipes: nobody empties a pipe while this waits.
    let [stdout, stderr] = ["stdout", "stderr"].map(|name| dir.join(name));
    let open = |path: &Path| File::create(path).with_context(|| format!("cannot create {}", path.display()));
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(open(&stdout)?)
        .stderr(open(&stderr)?)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let status = loop {
        match child.try_wait().with_context(|| format!("cannot wait for `{command}`"))? {
            Some(status) => break Some(status),
            None if start.elapsed() >= limit => break None,
            None => sleep(POLL),
        }
    };
    let ended = match status {
        Some(status) => status.to_string(),
        None => {
            // One that waits for a hung kernel may not even die of this; there is nothing more to do about it.
            let _ = child.kill();
            format!("killed after {} s, its limit", limit.as_secs())
        }
    };
    let text = |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let said = text(&stderr).unwrap_or_default();
    let skipped = said.lines().count().saturating_sub(KEPT_LINES);
    Ok(Ran {
        command,
        passed: status.is_some_and(|status| status.success()),
        ended,
        seconds: start.elapsed().as_secs_f64(),
        report: serde_json::from_str(&text(&stdout).unwrap_or_default()).unwrap_or(Value::Null),
        said: said.lines().skip(skipped).map(str::to_owned).collect(),
    })
}

#[cfg(all(test, unix))]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::process;

    fn shell(script: &str, limit: Duration) -> Ran {
        let name = format!("hardware-report-test-{:?}", std::thread::current().id());
        let dir = process::target_dir(&process::workspace_root()).join("tmp").join(name);
        let ran = run(Path::new("/bin/sh"), &["-c", script], &dir, limit).unwrap();
        fs::remove_dir_all(dir).unwrap();
        ran
    }

    #[test]
    fn what_a_program_reported_is_kept_even_if_it_failed() {
        let ran = shell("echo '{\"failed\": 1}'; seq 1 50 >&2; exit 3", Duration::from_secs(60));
        assert_eq!((ran.passed, &ran.report), (false, &json!({"failed": 1})));
        assert!(ran.ended.contains('3'), "{}", ran.ended);
        assert_eq!((ran.said.len(), ran.said.last().map(String::as_str)), (KEPT_LINES, Some("50")));
        let ran = shell("echo no json", Duration::from_secs(60));
        assert_eq!((ran.passed, ran.report), (true, Value::Null));
    }

    #[test]
    fn what_hangs_is_killed_and_where_it_was_is_kept() {
        let ran = shell("echo golden cases >&2; exec sleep 600", Duration::from_secs(1));
        assert!(!ran.passed && ran.seconds < 300.0);
        assert_eq!(ran.said, ["golden cases"]);
        assert!(ran.ended.contains("killed after 1 s"), "{}", ran.ended);
    }
}

//! stub
use super::Verdict;
use clap::Args;
#[derive(Debug, Args)]
pub(super) struct BenchArgs {}
pub(super) fn run(_args: &BenchArgs) -> anyhow::Result<Verdict> {
    Ok(Verdict::Passed)
}

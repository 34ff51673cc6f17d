//! A progress bar for loads that take long enough to be noticed.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Shorter loads show nothing.
const NOTICED: Duration = Duration::from_secs(1);

/// What a loader is given to tell (experts done, experts in all): draws on a terminal once the load takes long, else
/// nothing at all.
pub(super) fn bar() -> impl FnMut(usize, usize) {
    let start = Instant::now();
    let terminal = stderr().is_terminal();
    let mut bar: Option<ProgressBar> = None;
    move |done, all| {
        if !terminal || (bar.is_none() && start.elapsed() < NOTICED) {
            return;
        }
        let bar = bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("loading experts {wide_bar} {pos}/{len} {eta}");
            let bar = ProgressBar::new(all as u64);
            if let Ok(style) = style { bar.with_style(style) } else { bar }
        });
        bar.set_position(done as u64);
        if done == all {
            bar.finish_and_clear();
        }
    }
}

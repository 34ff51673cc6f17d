//! The part of a page that is generated: between two marks, which stay.

use anyhow::{Result, bail};

const BEGIN: &str = "<!-- bench:begin -->";
const END: &str = "<!-- bench:end -->";

/// `text` with `generated`, whole lines, between its marks.
pub(super) fn with_region(name: &str, text: &str, generated: &str) -> Result<String> {
    let lines: Vec<&str> = text.lines().collect();
    let place = |mark: &str| -> Result<usize> {
        let mut places = lines.iter().enumerate().filter(|(_, line)| line.trim() == mark).map(|(at, _)| at);
        match (places.next(), places.next()) {
            (Some(place), None) => Ok(place),
            (None, _) => bail!(
                "{name} has no line {mark}; put {BEGIN} and {END} on lines of their own where the tables are to stand"
            ),
            (Some(first), Some(second)) => bail!(
                "{name} has {mark} in lines {} and {}, but one region is replaced; remove the other mark",
                first + 1,
                second + 1
            ),
        }
    };
    let (begin, end) = (place(BEGIN)?, place(END)?);
    if end < begin {
        bail!("{name} has {END} in line {}, before {BEGIN} in line {}; exchange them", end + 1, begin + 1);
    }
    let with_ends = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    Ok(with_ends(&lines[..=begin]) + generated + &with_ends(&lines[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_the_marks_is_replaced() {
        let page = format!("top\n{BEGIN}\nold\nolder\n{END}\nbottom\n");
        let replaced = with_region("A.md", &page, "new\n").unwrap();
        assert_eq!(replaced, format!("top\n{BEGIN}\nnew\n{END}\nbottom\n"));
        assert_eq!(with_region("A.md", &replaced, "new\n").unwrap(), replaced);
    }

    #[test]
    fn marks_that_are_not_as_they_should_be_are_named() {
        for (page, parts) in [
            ("text".to_owned(), ["A.md has no line <!-- bench:begin -->", "on lines of their own"]),
            (format!("{BEGIN}\n"), ["A.md has no line <!-- bench:end -->", "on lines of their own"]),
            (format!("{BEGIN}\n{END}\nx\n{BEGIN}\n"), ["<!-- bench:begin --> in lines 1 and 4", "remove"]),
            (format!("{END}\n{BEGIN}\n"), ["<!-- bench:end --> in line 1, before", "exchange"]),
        ] {
            let error = with_region("A.md", &page, "").unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} are not in: {error}");
        }
    }
}

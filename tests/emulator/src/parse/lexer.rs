//! Words, numbers and punctuation of PTX source (PTX ISA 4.1, 4.2, 4.4, 4.5).

use crate::error::EmulatorError;

/// One token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    /// Identifier, directive or opcode, dots and `::` included.
    Word(String),
    /// Integer constant.
    Integer(u64),
    /// `0f` constant.
    Single(u32),
    /// `0d` constant, or a decimal one.
    Double(u64),
    /// Text between quotes.
    Text(String),
    /// Anything else.
    Sign(char),
    /// End of the text.
    End,
}

impl Token {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Word(word) => format!("`{word}`"),
            Self::Integer(value) => format!("the number {value}"),
            Self::Single(bits) => format!("the constant 0f{bits:08X}"),
            Self::Double(bits) => format!("the constant 0d{bits:016X}"),
            Self::Text(text) => format!("the text {text:?}"),
            Self::Sign(sign) => format!("`{sign}`"),
            Self::End => "the end of the text".into(),
        }
    }
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'.')
}

/// All tokens with their lines, `End` last.
pub(super) fn tokens(source: &str) -> Result<Vec<(Token, u32)>, EmulatorError> {
    let bytes = source.as_bytes();
    let (mut at, mut line) = (0, 1);
    let mut tokens = Vec::new();
    while at < bytes.len() {
        let c = bytes[at];
        if c == b'\n' {
            line += 1;
            at += 1;
        } else if c.is_ascii_whitespace() {
            at += 1;
        } else if bytes[at..].starts_with(b"//") {
            at += bytes[at..].iter().position(|&b| b == b'\n').unwrap_or(bytes.len() - at);
        } else if bytes[at..].starts_with(b"/*") {
            let end = source[at..].find("*/").ok_or_else(|| wrong(line, "`*/`", "the end of the text"))?;
            line += bytes[at..at + end].iter().filter(|&&b| b == b'\n').count() as u32;
            at += end + 2;
        } else if c == b'"' {
            let end = source[at + 1..].find('"').ok_or_else(|| wrong(line, "`\"`", "the end of the text"))?;
            tokens.push((Token::Text(source[at + 1..at + 1 + end].into()), line));
            at += end + 2;
        } else if c.is_ascii_digit() {
            let end = bytes[at..].iter().position(|&b| !is_word(b)).map_or(bytes.len(), |n| at + n);
            tokens.push((number(&source[at..end], line)?, line));
            at = end;
        } else if is_word_start(c) {
            let start = at;
            at += 1;
            while at < bytes.len() {
                if is_word(bytes[at]) {
                    at += 1;
                } else if bytes[at..].starts_with(b"::") {
                    at += 2;
                } else {
                    break;
                }
            }
            tokens.push((Token::Word(source[start..at].into()), line));
        } else {
            tokens.push((Token::Sign(c as char), line));
            at += 1;
        }
    }
    tokens.push((Token::End, line));
    Ok(tokens)
}

pub(super) fn wrong(line: u32, expected: &str, found: &str) -> EmulatorError {
    EmulatorError::Syntax { line, expected: expected.into(), found: found.into() }
}

fn number(text: &str, line: u32) -> Result<Token, EmulatorError> {
    let invalid = || wrong(line, "a number", &format!("`{text}`"));
    let radix = |digits: &str, radix| u64::from_str_radix(digits, radix).map_err(|_| invalid());
    if text.contains('.') {
        return text.parse().map(|value: f64| Token::Double(value.to_bits())).map_err(|_| invalid());
    }
    let lower = text.to_ascii_lowercase();
    if let Some(digits) = lower.strip_prefix("0f").filter(|digits| digits.len() == 8) {
        return Ok(Token::Single(radix(digits, 16)? as u32));
    }
    if let Some(digits) = lower.strip_prefix("0d").filter(|digits| digits.len() == 16) {
        return Ok(Token::Double(radix(digits, 16)?));
    }
    let digits = lower.strip_suffix('u').unwrap_or(&lower);
    let value = if let Some(digits) = digits.strip_prefix("0x") {
        radix(digits, 16)?
    } else if let Some(digits) = digits.strip_prefix("0b") {
        radix(digits, 2)?
    } else if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit()) {
        radix(digits, 8)?
    } else {
        radix(digits, 10)?
    };
    Ok(Token::Integer(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_lines() {
        let words: Vec<_> =
            tokens("@!%p1 bra $L_1; // x\n/* a\n */ cp.async.bulk.shared::cluster -0x1F 0f3F800000 017")
                .unwrap()
                .into_iter()
                .collect();
        let expected = [
            (Token::Sign('@'), 1),
            (Token::Sign('!'), 1),
            (Token::Word("%p1".into()), 1),
            (Token::Word("bra".into()), 1),
            (Token::Word("$L_1".into()), 1),
            (Token::Sign(';'), 1),
            (Token::Word("cp.async.bulk.shared::cluster".into()), 3),
            (Token::Sign('-'), 3),
            (Token::Integer(31), 3),
            (Token::Single(0x3F80_0000), 3),
            (Token::Integer(15), 3),
            (Token::End, 3),
        ];
        assert_eq!(words, expected);
    }
}

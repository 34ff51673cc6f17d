//! The statements of a PTX text, each with its place, so that one can be replaced and the rest stays as it is.

use std::ops::Range;

/// An instruction in a kernel.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statement {
    /// Entry point.
    pub(super) kernel: String,
    /// Line of the text, from 1.
    pub(super) line: u32,
    /// Bytes of the text, the semicolon included.
    pub(super) range: Range<usize>,
    /// `@%p1 ` or `@!%p1 `.
    pub(super) guard: Option<String>,
    /// Opcode with its modifiers.
    pub(super) opcode: String,
    /// Operands; a vector in braces is one.
    pub(super) operands: Vec<String>,
}

impl Statement {
    /// The statement as text, with these operands and this opcode.
    pub(super) fn with(&self, opcode: &str, operands: &[String]) -> String {
        let guard = self.guard.as_deref().unwrap_or("");
        let space = if operands.is_empty() { "" } else { " " };
        format!("{guard}{opcode}{space}{};", operands.join(", "))
    }

    /// The statement as text.
    pub(super) fn text(&self) -> String {
        self.with(&self.opcode, &self.operands)
    }

    /// The first part of the opcode.
    pub(super) fn name(&self) -> &str {
        self.opcode.split('.').next().unwrap_or("")
    }

    /// Whether the opcode has this part.
    pub(super) fn has(&self, part: &str) -> bool {
        self.opcode.split('.').any(|found| found == part)
    }
}

/// Text in which every register is called by its class alone: the same before and after a compiler numbers them anew.
pub(super) fn without_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_register = false;
    for c in text.chars() {
        in_register = c == '%' || in_register && c.is_ascii_alphanumeric();
        if !(in_register && c.is_ascii_digit()) {
            out.push(c);
        }
    }
    out
}

/// All instructions of a module's kernels, in order.
pub(super) fn statements(ptx: &str) -> Vec<Statement> {
    let mut found = Vec::new();
    let mut kernel: Option<String> = None;
    let mut start = 0;
    for (index, line) in ptx.split_inclusive('\n').enumerate() {
        let code = line.split("//").next().unwrap_or("");
        if let Some(rest) = code.split(".entry ").nth(1) {
            kernel = Some(rest.split(['(', ' ']).next().unwrap_or("").trim().to_owned());
        }
        let mut at = 0;
        for part in code.split_inclusive(';') {
            let begin = start + at + part.len() - part.trim_start().len();
            let end = start + at + part.len();
            at += part.len();
            if let (Some(kernel), Some(text)) = (&kernel, part.trim().strip_suffix(';')) {
                let opened = text.trim_start_matches(['{', ' ', '\t']);
                let begin = begin + text.len() - opened.len();
                found.extend(parse(kernel, index as u32 + 1, begin..end, opened));
            }
        }
        start += line.len();
    }
    found
}

/// A statement without its semicolon; none where it is a directive.
fn parse(kernel: &str, line: u32, range: Range<usize>, text: &str) -> Option<Statement> {
    if text.starts_with(['.', '}']) || text.is_empty() {
        return None;
    }
    // A label may stand before it.
    let unlabelled = text.find(": ").map_or(text, |colon| text[colon + 1..].trim_start());
    let begin = range.start + text.len() - unlabelled.len();
    let (guard, rest) = match unlabelled.strip_prefix('@') {
        Some(_) => {
            let end = unlabelled.find(char::is_whitespace)?;
            (Some(format!("{} ", &unlabelled[..end])), unlabelled[end..].trim_start())
        }
        None => (None, unlabelled),
    };
    let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    Some(Statement {
        kernel: kernel.to_owned(),
        line,
        range: begin..range.end,
        guard,
        opcode: opcode.to_owned(),
        operands: split_operands(operands),
    })
}

/// Splits at the commas outside of braces and brackets.
fn split_operands(text: &str) -> Vec<String> {
    let mut operands = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                operands.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = operands.last_mut() {
            last.push(c);
        }
    }
    operands.iter().map(|operand| operand.trim().to_owned()).filter(|operand| !operand.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_know_their_place() {
        let ptx = ".version 8.0\n.visible .entry first(\n\t.param .b64 a\n)\n{\n\t.reg .pred %p<3>;\n\t@!%p1 bra \t$L__1; // so\n\
                   L: ld.global.v2.u32 {%r1, %r2}, [%rd1+8]; ret;\n}\n";
        let found = statements(ptx);
        let texts: Vec<_> = found.iter().map(|statement| &ptx[statement.range.clone()]).collect();
        assert_eq!(texts, ["@!%p1 bra \t$L__1;", "ld.global.v2.u32 {%r1, %r2}, [%rd1+8];", "ret;"]);
        assert_eq!(found[0].guard.as_deref(), Some("@!%p1 "));
        assert_eq!(found[1].operands, ["{%r1, %r2}", "[%rd1+8]"]);
        assert_eq!((found[1].line, found[1].kernel.as_str(), found[1].name()), (8, "first", "ld"));
        assert_eq!(found[0].text(), "@!%p1 bra $L__1;");
    }

    #[test]
    fn registers_lose_their_numbers_only() {
        assert_eq!(without_numbers("add.s32 %r12, %rd3, 45; [%r1+16]"), "add.s32 %r, %rd, 45; [%r+16]");
    }
}

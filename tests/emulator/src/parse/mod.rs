//! From text to [`ast`]: the subset of PTX that LLVM and our inline assembly write.

pub mod ast;
mod body;
mod calls;
mod lexer;

use ast::{Ast, KernelAst, Space, Variable};
use lexer::{Token, wrong};

use crate::error::EmulatorError;

/// Reads a module.
///
/// # Errors
/// [`EmulatorError::Syntax`]: the first thing that is not understood.
pub fn parse(source: &str) -> Result<Ast, EmulatorError> {
    let mut parser = Parser { tokens: lexer::tokens(source)?, at: 0, scopes: 0 };
    parser.module()
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    /// Inner scopes seen, to tell their names apart.
    scopes: u32,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let token = self.tokens[self.at].0.clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn wrong<T>(&self, expected: &str) -> Result<T, EmulatorError> {
        Err(wrong(self.line(), expected, &self.peek().describe()))
    }

    fn is(&self, sign: char) -> bool {
        *self.peek() == Token::Sign(sign)
    }

    fn skip(&mut self, sign: char) -> bool {
        let found = self.is(sign);
        if found {
            self.next();
        }
        found
    }

    fn sign(&mut self, sign: char) -> Result<(), EmulatorError> {
        if self.skip(sign) { Ok(()) } else { self.wrong(&format!("`{sign}`")) }
    }

    fn word(&mut self, expected: &str) -> Result<String, EmulatorError> {
        match self.peek() {
            Token::Word(word) => {
                let word = word.clone();
                self.next();
                Ok(word)
            }
            _ => self.wrong(expected),
        }
    }

    fn integer(&mut self) -> Result<u64, EmulatorError> {
        match *self.peek() {
            Token::Integer(value) => {
                self.next();
                Ok(value)
            }
            _ => self.wrong("a number"),
        }
    }

    fn skip_to(&mut self, sign: char) {
        while !self.skip(sign) && *self.peek() != Token::End {
            self.next();
        }
    }

    fn module(&mut self) -> Result<Ast, EmulatorError> {
        let mut ast = Ast::default();
        let mut external = false;
        let mut functions = Vec::new();
        loop {
            let line = self.line();
            match self.next() {
                Token::End => {
                    calls::expand(&mut ast.kernels, &functions)?;
                    return Ok(ast);
                }
                Token::Sign(';') => {}
                Token::Word(word) => match word.as_str() {
                    ".version" => {
                        // Major and minor come as one number with a dot.
                        self.next();
                    }
                    ".address_size" => {
                        if self.integer()? != 64 {
                            return Err(wrong(line, "64-bit addresses", "another size"));
                        }
                    }
                    ".target" => {
                        ast.target = self.word("a target")?;
                        while self.skip(',') {
                            self.word("a target option")?;
                        }
                    }
                    ".visible" | ".weak" | ".common" => {}
                    ".extern" => {
                        external = true;
                        continue;
                    }
                    ".pragma" => self.skip_to(';'),
                    ".entry" => ast.kernels.push(self.entry()?),
                    ".func" => {
                        let function = self.function()?;
                        functions.extend(function);
                    }
                    _ => match space(&word) {
                        Some(space) => self.variables(space, external, &mut ast.variables)?,
                        None => return Err(wrong(line, "a directive", &format!("`{word}`"))),
                    },
                },
                other => return Err(wrong(line, "a directive", &other.describe())),
            }
            external = false;
        }
    }

    /// After `.entry`.
    fn entry(&mut self) -> Result<KernelAst, EmulatorError> {
        let mut kernel = KernelAst {
            name: self.word("a kernel's name")?,
            params: Vec::new(),
            registers: Vec::new(),
            variables: Vec::new(),
            statements: Vec::new(),
            max_threads: 0,
            min_blocks: 0,
            max_registers: 0,
            cluster: None,
            explicit_cluster: false,
            max_cluster: 0,
        };
        if self.skip('(') {
            while !self.skip(')') {
                if self.word("`.param`")? != ".param" {
                    return self.wrong("`.param`");
                }
                let param = self.variable(Space::Param, false)?;
                kernel.params.push(param);
                self.skip(',');
            }
        }
        while !self.is('{') {
            match self.word("a performance directive or the body")?.as_str() {
                ".maxntid" | ".reqntid" => {
                    let mut threads = self.integer()?;
                    while self.skip(',') {
                        threads *= self.integer()?;
                    }
                    kernel.max_threads = threads as u32;
                }
                ".minnctapersm" => kernel.min_blocks = self.integer()? as u32,
                ".explicitcluster" => kernel.explicit_cluster = true,
                ".maxclusterrank" => kernel.max_cluster = self.integer()? as u32,
                ".reqnctapercluster" => {
                    kernel.cluster = Some(self.integer()? as u32);
                    while self.skip(',') {
                        if self.integer()? != 1 {
                            return self.wrong("a cluster along x");
                        }
                    }
                }
                ".maxnreg" => kernel.max_registers = self.integer()? as u32,
                ".pragma" => self.skip_to(';'),
                _ => return self.wrong("a performance directive or the body"),
            }
        }
        self.sign('{')?;
        kernel.statements = self.body(&mut kernel.registers, &mut kernel.variables)?;
        Ok(kernel)
    }

    /// Variables of one declaration, up to the `;`.
    fn variables(&mut self, space: Space, external: bool, all: &mut Vec<Variable>) -> Result<(), EmulatorError> {
        let variable = self.variable(space, external)?;
        all.push(variable);
        self.sign(';')
    }

    /// One variable after its space: alignment, type, name, dimensions, initial value.
    fn variable(&mut self, space: Space, external: bool) -> Result<Variable, EmulatorError> {
        let (mut align, mut element) = (0, 0);
        let name = loop {
            let line = self.line();
            let word = self.word("a type or a name")?;
            match word.as_str() {
                ".align" => align = self.integer()?,
                // `.param .b64 .ptr .global .align 16 name`
                ".ptr" => {
                    if matches!(self.peek(), Token::Word(word) if space_of_pointer(word)) {
                        self.next();
                    }
                    if *self.peek() == Token::Word(".align".into()) {
                        self.next();
                        self.integer()?;
                    }
                }
                _ if word.starts_with('.') => match crate::types::Type::named(&word[1..]) {
                    Some(kind) => element = kind.bytes() as u64,
                    None => return Err(wrong(line, "a type", &format!("`{word}`"))),
                },
                _ => break word,
            }
        };
        let mut count = 1;
        while self.skip('[') {
            if self.skip(']') {
                count = 0;
            } else {
                count *= self.integer()?;
                self.sign(']')?;
            }
        }
        let mut data = Vec::new();
        if self.skip('=') {
            let braces = self.skip('{');
            loop {
                let negative = self.skip('-');
                let value = match *self.peek() {
                    Token::Integer(value) => value,
                    Token::Single(bits) => u64::from(bits),
                    Token::Double(bits) => bits,
                    _ => return self.wrong("a constant"),
                };
                self.next();
                let value = if negative { value.wrapping_neg() } else { value };
                data.extend_from_slice(&value.to_le_bytes()[..element as usize]);
                if !(braces && self.skip(',')) {
                    break;
                }
            }
            if braces {
                self.sign('}')?;
            }
        }
        Ok(Variable { name, space, align: align.max(element).max(1), bytes: element * count, data, external })
    }
}

fn space_of_pointer(word: &str) -> bool {
    matches!(word, ".global" | ".shared" | ".const" | ".local")
}

fn space(word: &str) -> Option<Space> {
    Some(match word {
        ".shared" => Space::Shared,
        ".global" => Space::Global,
        ".const" => Space::Const,
        ".local" => Space::Local,
        _ => return None,
    })
}

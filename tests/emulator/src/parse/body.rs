//! The body of a kernel: declarations, labels, instructions, inner scopes.

use std::collections::HashMap;

use super::ast::{InstructionAst, Operand, RegisterDeclaration, Space, Statement, Variable};
use super::lexer::Token;
use super::{Parser, space};
use crate::error::EmulatorError;

impl Parser {
    /// After `{`, up to and with its `}`. Names of inner scopes are made unique.
    pub(super) fn body(
        &mut self,
        registers: &mut Vec<RegisterDeclaration>,
        variables: &mut Vec<Variable>,
    ) -> Result<Vec<Statement>, EmulatorError> {
        let mut statements = Vec::new();
        while !self.skip('}') {
            if self.skip('{') {
                statements.extend(self.scope(registers, variables)?);
                continue;
            }
            if self.skip(';') {
                continue;
            }
            let line = self.line();
            let guard = if self.skip('@') {
                let negated = self.skip('!');
                Some((self.word("a predicate register")?, negated))
            } else {
                None
            };
            let word = self.word("a statement")?;
            match word.as_str() {
                ".reg" => self.registers(registers)?,
                ".pragma" | ".loc" => self.skip_to(';'),
                // Arguments of calls: each thread has its own, as in local memory.
                ".param" => self.variables(Space::Local, false, variables)?,
                _ if space(&word).is_some() => {
                    let space = space(&word).expect("checked by the guard");
                    self.variables(space, false, variables)?;
                }
                _ if word.starts_with('.') => {
                    self.at -= 1;
                    return self.wrong("a declaration or an instruction");
                }
                _ if guard.is_none() && self.skip(':') => statements.push(Statement::Label(word)),
                _ => {
                    let mut operands = Vec::new();
                    if !self.is(';') {
                        operands.push(self.operand()?);
                        while self.skip(',') {
                            operands.push(self.operand()?);
                        }
                    }
                    self.sign(';')?;
                    statements.push(Statement::Instruction(InstructionAst { line, guard, opcode: word, operands }));
                }
            }
        }
        Ok(statements)
    }

    fn registers(&mut self, registers: &mut Vec<RegisterDeclaration>) -> Result<(), EmulatorError> {
        let kind = self.word("a register type")?;
        loop {
            let name = self.word("a register's name")?;
            let count = if self.skip('<') {
                let count = self.integer()? as u32;
                self.sign('>')?;
                Some(count)
            } else {
                None
            };
            registers.push(RegisterDeclaration { name, kind: kind[1..].into(), count });
            if !self.skip(',') {
                return self.sign(';');
            }
        }
    }

    fn scope(
        &mut self,
        registers: &mut Vec<RegisterDeclaration>,
        variables: &mut Vec<Variable>,
    ) -> Result<Vec<Statement>, EmulatorError> {
        self.scopes += 1;
        let suffix = format!("@{}", self.scopes);
        let (mut inner_registers, mut inner_variables) = (Vec::new(), Vec::new());
        let mut statements = self.body(&mut inner_registers, &mut inner_variables)?;
        rename_all(&suffix, inner_registers, inner_variables, &mut statements, registers, variables);
        Ok(statements)
    }

    fn operand(&mut self) -> Result<Operand, EmulatorError> {
        if self.skip('{') {
            let mut elements = vec![self.operand()?];
            while self.skip(',') {
                elements.push(self.operand()?);
            }
            self.sign('}')?;
            return Ok(Operand::Vector(elements));
        }
        if self.skip('(') {
            let mut elements = Vec::new();
            while !self.skip(')') {
                elements.push(self.operand()?);
                self.skip(',');
            }
            return Ok(Operand::List(elements));
        }
        if self.skip('[') {
            let base = match self.peek() {
                Token::Word(_) => Some(self.word("an address")?),
                _ => None,
            };
            let offset = if base.is_none() || self.is('+') || self.is('-') { self.signed()? } else { 0 };
            self.sign(']')?;
            return Ok(Operand::Address { base, offset });
        }
        if self.skip('!') {
            return Ok(Operand::Not(self.word("a predicate register")?));
        }
        match *self.peek() {
            Token::Single(bits) => {
                self.next();
                return Ok(Operand::Single(bits));
            }
            Token::Double(bits) => {
                self.next();
                return Ok(Operand::Double(bits));
            }
            Token::Integer(_) | Token::Sign('-') => return Ok(Operand::Integer(self.signed()? as u64)),
            _ => {}
        }
        let name = self.word("an operand")?;
        if self.skip('|') {
            return Ok(Operand::Pair(name, self.word("the second destination")?));
        }
        if self.is('+') {
            return Ok(Operand::NamePlus(name, self.signed()?));
        }
        Ok(Operand::Name(name))
    }

    /// `+n`, `-n` or `n`, in two's complement.
    fn signed(&mut self) -> Result<i64, EmulatorError> {
        let plus = self.skip('+');
        let negative = self.skip('-');
        let _ = plus;
        let value = self.integer()? as i64;
        Ok(if negative { value.wrapping_neg() } else { value })
    }
}

/// Makes the names that a scope declares its own, and adds them to what is around it.
pub(super) fn rename_all(
    suffix: &str,
    inner_registers: Vec<RegisterDeclaration>,
    inner_variables: Vec<Variable>,
    statements: &mut [Statement],
    registers: &mut Vec<RegisterDeclaration>,
    variables: &mut Vec<Variable>,
) {
    let mut renamed = HashMap::new();
    for register in &inner_registers {
        match register.count {
            None => {
                renamed.insert(register.name.clone(), format!("{}{suffix}", register.name));
            }
            Some(count) => {
                for i in 0..count {
                    renamed.insert(format!("{}{i}", register.name), format!("{}{suffix}@{i}", register.name));
                }
            }
        }
    }
    for register in inner_registers {
        let (name, kind) = (format!("{}{suffix}", register.name), register.kind);
        let name = if register.count.is_some() { name + "@" } else { name };
        registers.push(RegisterDeclaration { name, kind, count: register.count });
    }
    for mut variable in inner_variables {
        let name = format!("{}{suffix}", variable.name);
        renamed.insert(std::mem::replace(&mut variable.name, name.clone()), name);
        variables.push(variable);
    }
    for statement in statements.iter() {
        if let Statement::Label(name) = statement {
            renamed.insert(name.clone(), format!("{name}{suffix}"));
        }
    }
    for statement in statements.iter_mut() {
        match statement {
            Statement::Label(name) => rename(&renamed, name),
            Statement::Instruction(instruction) => {
                if let Some((name, _)) = &mut instruction.guard {
                    rename(&renamed, name);
                }
                instruction.operands.iter_mut().for_each(|operand| rename_operand(&renamed, operand));
            }
        }
    }
}

pub(super) fn rename(renamed: &HashMap<String, String>, name: &mut String) {
    if let Some(new) = renamed.get(name) {
        name.clone_from(new);
    }
}

pub(super) fn rename_operand(renamed: &HashMap<String, String>, operand: &mut Operand) {
    match operand {
        Operand::Name(name) | Operand::NamePlus(name, _) | Operand::Not(name) => rename(renamed, name),
        Operand::Pair(first, second) => {
            rename(renamed, first);
            rename(renamed, second);
        }
        Operand::Vector(elements) | Operand::List(elements) => {
            elements.iter_mut().for_each(|element| rename_operand(renamed, element))
        }
        Operand::Address { base: Some(base), .. } => rename(renamed, base),
        Operand::Address { base: None, .. } | Operand::Integer(_) | Operand::Single(_) | Operand::Double(_) => {}
    }
}

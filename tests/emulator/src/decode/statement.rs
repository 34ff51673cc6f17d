//! One instruction while it is decoded. Whatever nobody asked for is refused in the end.

use std::cell::Cell;

use super::Refusal;
use crate::parse::ast::{InstructionAst, Operand};
use crate::types::Type;

/// Modifiers that nobody has taken yet.
pub(crate) struct Modifiers<'a> {
    left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    /// Takes a modifier, if it is there.
    pub(crate) fn take(&mut self, name: &str) -> bool {
        match self.left.iter().position(|&modifier| modifier == name) {
            Some(index) => {
                self.left.remove(index);
                true
            }
            None => false,
        }
    }

    /// Whether a modifier is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.left.contains(&name)
    }

    /// Takes a modifier that must be there.
    pub(crate) fn need(&mut self, name: &str) -> Result<(), Refusal> {
        if self.take(name) { Ok(()) } else { Err(format!("without .{name}").into()) }
    }

    /// Takes the first of `names` that is there.
    pub(crate) fn one_of<T: Copy>(&mut self, names: &[(&str, T)]) -> Option<T> {
        names.iter().find(|(name, _)| self.take(name)).map(|&(_, value)| value)
    }

    /// Takes the first type.
    pub(crate) fn kind(&mut self) -> Result<Type, Refusal> {
        let found = self.left.iter().enumerate().find_map(|(i, name)| Some((i, Type::named(name)?)));
        let (index, kind) = found.ok_or("it has no type that is known")?;
        self.left.remove(index);
        Ok(kind)
    }

    /// Takes the first type if it is an integer type.
    pub(crate) fn integer_kind(&mut self) -> Option<Type> {
        let first = self.left.iter().enumerate().find_map(|(i, name)| Some((i, Type::named(name)?)));
        let (index, kind) = first.filter(|(_, kind)| kind.is_integer())?;
        self.left.remove(index);
        Some(kind)
    }

    /// Takes the next modifier, whatever it is.
    pub(crate) fn next(&mut self) -> Option<&'a str> {
        (!self.left.is_empty()).then(|| self.left.remove(0))
    }
}

/// An instruction while it is decoded.
pub(crate) struct Statement<'a> {
    /// Opcode without modifiers.
    pub(crate) name: &'a str,
    pub(crate) modifiers: Modifiers<'a>,
    operands: &'a [Operand],
    /// Operands that were asked for.
    used: Cell<u32>,
}

impl<'a> Statement<'a> {
    pub(super) fn new(instruction: &'a InstructionAst) -> Self {
        let mut parts = instruction.opcode.split('.');
        let name = parts.next().unwrap_or_default();
        let modifiers = Modifiers { left: parts.collect() };
        Self { name, modifiers, operands: &instruction.operands, used: Cell::new(0) }
    }

    /// Number of operands.
    pub(crate) fn count(&self) -> usize {
        self.operands.len()
    }

    /// An operand.
    pub(crate) fn operand(&self, index: usize) -> Result<&'a Operand, Refusal> {
        self.used.set(self.used.get() | 1 << index);
        self.operands.get(index).ok_or_else(|| format!("it has only {} operands", self.operands.len()).into())
    }

    /// Refuses what is left over.
    pub(super) fn finish(&self) -> Result<(), Refusal> {
        if let Some(modifier) = self.modifiers.left.first() {
            return Err(format!("modifier .{modifier}").into());
        }
        match (0..self.operands.len()).find(|&index| self.used.get() >> index & 1 == 0) {
            Some(index) => Err(format!("operand {}", index + 1).into()),
            None => Ok(()),
        }
    }
}

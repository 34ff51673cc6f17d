//! The order in which code is laid out, so that "lowest place first" makes diverged lanes meet as early as possible.
//!
//! Blocks are ordered topologically, the blocks of a loop together, the loop's head first (Bourdoncle's weak topological
//! order). Lanes that left a loop wait behind it until the last has left; both sides of a branch come before what
//! follows them.

use std::collections::HashMap;

use crate::parse::ast::{Operand, Statement};

/// One instruction of the laid-out code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    /// The statement with this index.
    Statement(usize),
    /// A jump to a place, where the source would fall through.
    Jump(u32),
    /// The end of the body, reached without `ret`.
    End,
}

/// Laid-out code and the places of its labels.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) items: Vec<Item>,
    pub(super) labels: HashMap<String, u32>,
}

struct Block {
    /// Statements, labels left out.
    statements: Vec<usize>,
    successors: Vec<usize>,
    /// Where control goes at the end without a jump.
    falls_to: Option<usize>,
}

/// Lays out a body; `Err` names a label that does not exist.
pub(super) fn layout(statements: &[Statement]) -> Result<Layout, String> {
    let (blocks, labels) = blocks(statements)?;
    let order = Order::of(&blocks);
    let mut layout = Layout::default();
    let mut places = vec![0; blocks.len()];
    let mut jumps = Vec::new();
    for (position, &block) in order.iter().enumerate() {
        places[block] = layout.items.len() as u32;
        layout.items.extend(blocks[block].statements.iter().map(|&statement| Item::Statement(statement)));
        if blocks[block].statements.is_empty() && blocks[block].falls_to.is_none() {
            layout.items.push(Item::End);
        }
        if let Some(next) = blocks[block].falls_to
            && order.get(position + 1) != Some(&next)
        {
            jumps.push((layout.items.len(), next));
            layout.items.push(Item::Jump(0));
        }
    }
    for (item, block) in jumps {
        layout.items[item] = Item::Jump(places[block]);
    }
    layout.labels = labels.into_iter().map(|(name, block)| (name, places[block])).collect();
    Ok(layout)
}

fn blocks(statements: &[Statement]) -> Result<(Vec<Block>, HashMap<String, usize>), String> {
    let empty = || Block { statements: Vec::new(), successors: Vec::new(), falls_to: None };
    let mut blocks = vec![empty()];
    let mut labels = HashMap::new();
    let mut targets = Vec::new();
    for (index, statement) in statements.iter().enumerate() {
        let current = blocks.len() - 1;
        match statement {
            Statement::Label(name) => {
                labels.insert(name.clone(), current + 1);
                blocks[current].falls_to = Some(current + 1);
                blocks.push(empty());
            }
            Statement::Instruction(instruction) => {
                blocks[current].statements.push(index);
                let name = instruction.opcode.split('.').next().unwrap_or_default();
                let jump = match (name, instruction.operands.first()) {
                    ("bra", Some(Operand::Name(target))) => Some(target),
                    _ => None,
                };
                let ends = matches!(name, "bra" | "ret" | "exit" | "trap");
                if let Some(target) = jump {
                    targets.push((current, target));
                }
                if ends {
                    blocks[current].falls_to = instruction.guard.is_some().then_some(current + 1);
                    blocks.push(empty());
                }
            }
        }
    }
    for (block, target) in targets {
        let target = *labels.get(target).ok_or_else(|| format!("there is no label {target}"))?;
        blocks[block].successors.push(target);
    }
    for block in &mut blocks {
        block.successors.extend(block.falls_to);
    }
    Ok((blocks, labels))
}

/// Bourdoncle's algorithm: Tarjan's strongly connected components, and again inside each without its head.
struct Order<'a> {
    blocks: &'a [Block],
    number: Vec<u32>,
    stack: Vec<usize>,
    counter: u32,
}

impl<'a> Order<'a> {
    fn of(blocks: &'a [Block]) -> Vec<usize> {
        let mut order = Self { blocks, number: vec![0; blocks.len()], stack: Vec::new(), counter: 0 };
        // Collected back to front.
        let mut reversed = Vec::new();
        order.visit(0, &mut reversed);
        reversed.reverse();
        reversed
    }

    fn visit(&mut self, block: usize, reversed: &mut Vec<usize>) -> u32 {
        self.stack.push(block);
        self.counter += 1;
        self.number[block] = self.counter;
        let mut head = self.counter;
        let mut is_loop = false;
        // The fall-through is visited first, so that it ends up as late as possible: behind the jump's target.
        for &successor in self.blocks[block].successors.iter().rev() {
            let lowest = match self.number[successor] {
                0 => self.visit(successor, reversed),
                number => number,
            };
            if lowest <= head {
                head = lowest;
                is_loop = true;
            }
        }
        if head == self.number[block] {
            self.number[block] = u32::MAX;
            while let Some(inner) = self.stack.pop() {
                if inner == block {
                    break;
                }
                if is_loop {
                    self.number[inner] = 0;
                }
            }
            if is_loop {
                let mut component = Vec::new();
                for &successor in self.blocks[block].successors.iter().rev() {
                    if self.number[successor] == 0 {
                        self.visit(successor, &mut component);
                    }
                }
                reversed.extend(component);
            }
            reversed.push(block);
        }
        head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(source: &str) -> Vec<String> {
        let body = format!(".version 8.0 .target sm_80 .visible .entry k() {{ {source} }}");
        let statements = crate::parse::parse(&body).unwrap().kernels.remove(0).statements;
        let layout = layout(&statements).unwrap();
        layout
            .items
            .iter()
            .map(|item| match *item {
                Item::Statement(index) => match &statements[index] {
                    Statement::Instruction(instruction) => instruction.opcode.clone(),
                    Statement::Label(name) => name.clone(),
                },
                Item::Jump(place) => format!("jump {place}"),
                Item::End => "end".into(),
            })
            .collect()
    }

    #[test]
    fn both_sides_of_a_branch_before_what_follows() {
        let source = "@%p bra C; B: b; bra.uni D; E: ret; D: d; bra E; C: c; bra D;";
        assert_eq!(order(source), ["bra", "jump 4", "c", "bra", "b", "bra.uni", "d", "bra", "ret"]);
    }

    #[test]
    fn a_loop_stays_together() {
        // The exit stands in the middle of the loop's text.
        let source = "A: a; @%p bra OUT; bra B; OUT: out; ret; B: b; bra A;";
        assert_eq!(order(source), ["a", "bra", "bra", "b", "bra", "out", "ret"]);
    }
}

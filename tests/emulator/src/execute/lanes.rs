//! Instructions that do the same in every lane: a scalar function of one to four registers, inlined into a loop.

use super::{Condition, Context, Execute, Fault, Pred, Reg, Step};

/// `d = f(a)`
pub(crate) struct Unary<F> {
    pub(crate) f: F,
    pub(crate) d: Reg,
    pub(crate) a: Reg,
}

impl<F: Fn(u64) -> u64 + Send + Sync> Execute for Unary<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let a = cx.read(self.a, lanes)?;
        cx.write(self.d, lanes, &a.map(&self.f));
        Ok(Step::Next)
    }
}

/// `d = f(a, b)`
pub(crate) struct Binary<F> {
    pub(crate) f: F,
    pub(crate) d: Reg,
    pub(crate) a: Reg,
    pub(crate) b: Reg,
}

impl<F: Fn(u64, u64) -> u64 + Send + Sync> Execute for Binary<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (a, b) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?);
        cx.write(self.d, lanes, &std::array::from_fn(|i| (self.f)(a[i], b[i])));
        Ok(Step::Next)
    }
}

/// `d = f(a, b, c)`
pub(crate) struct Ternary<F> {
    pub(crate) f: F,
    pub(crate) d: Reg,
    pub(crate) a: Reg,
    pub(crate) b: Reg,
    pub(crate) c: Reg,
}

impl<F: Fn(u64, u64, u64) -> u64 + Send + Sync> Execute for Ternary<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (a, b, c) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?, cx.read(self.c, lanes)?);
        cx.write(self.d, lanes, &std::array::from_fn(|i| (self.f)(a[i], b[i], c[i])));
        Ok(Step::Next)
    }
}

/// `d = f(a, b, c, e)`
pub(crate) struct Quaternary<F> {
    pub(crate) f: F,
    pub(crate) d: Reg,
    pub(crate) sources: [Reg; 4],
}

impl<F: Fn(u64, u64, u64, u64) -> u64 + Send + Sync> Execute for Quaternary<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let [a, b, c, e] = self.sources;
        let (a, b, c, e) = (cx.read(a, lanes)?, cx.read(b, lanes)?, cx.read(c, lanes)?, cx.read(e, lanes)?);
        cx.write(self.d, lanes, &std::array::from_fn(|i| (self.f)(a[i], b[i], c[i], e[i])));
        Ok(Step::Next)
    }
}

/// How a comparison is combined with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    And,
    Or,
    Xor,
}

impl Combine {
    pub(crate) fn apply(self, a: u32, b: u32) -> u32 {
        match self {
            Self::And => a & b,
            Self::Or => a | b,
            Self::Xor => a ^ b,
        }
    }
}

/// `p|q = f(a, b) combine c`
pub(crate) struct Compare<F> {
    pub(crate) f: F,
    pub(crate) p: Option<Pred>,
    pub(crate) q: Option<Pred>,
    pub(crate) a: Reg,
    pub(crate) b: Reg,
    pub(crate) with: Option<(Combine, Condition)>,
}

impl<F: Fn(u64, u64) -> bool + Send + Sync> Execute for Compare<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (a, b) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?);
        let bits = (0..32).fold(0, |bits, i| bits | u32::from((self.f)(a[i], b[i])) << i);
        let (p, q) = match self.with {
            None => (bits, !bits),
            Some((combine, condition)) => {
                let c = cx.holds(condition, lanes)?;
                (combine.apply(bits, c), combine.apply(!bits, c))
            }
        };
        if let Some(register) = self.p {
            cx.write_predicate(register, lanes, p);
        }
        if let Some(register) = self.q {
            cx.write_predicate(register, lanes, q);
        }
        Ok(Step::Next)
    }
}

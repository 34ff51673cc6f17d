//! Matrices in shared memory that `wgmma` reads: descriptors and layouts (PTX ISA 9.7.15.5.1.2).
//!
//! The unit of all layouts is a chunk: 16 bytes, 8 elements that follow each other along K (K-major), or along M or N
//! (MN-major). `w` is the width of the swizzle in bytes, 16 where there is none.
//!
//! | | offset of a chunk from the start |
//! |---|---|
//! | K-major, no swizzle | row % 8 * 16 + row / 8 * stride + chunk * leading |
//! | K-major | row % 8 * w + row / 8 * stride + chunk * 16 |
//! | MN-major, no swizzle | k % 8 * 16 + k / 8 * leading + chunk * stride |
//! | MN-major | k % 8 * w + k / 8 * stride + chunk % (w / 16) * 16 + chunk / (w / 16) * leading |
//!
//! Then bits 4 and up of the address, as many as w needs, are flipped by those from bit 7 on, counted from where the base
//! offset says that the pattern starts.

use crate::memory::shared::BLOCK_SHIFT;

/// A decoded descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    start: u32,
    /// Leading dimension and stride dimension offsets in bytes.
    leading: u32,
    stride: u32,
    base: u32,
    /// Bytes of the swizzle.
    width: u32,
}

/// Bytes of a chunk.
const CHUNK: u32 = 16;
/// Rows (or columns along K) of a pattern.
const PATTERN: u32 = 8;
/// Bits of a descriptor that mean something.
const FIELDS: u64 = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62;

impl Descriptor {
    /// Of a matrix in the shared memory of a block of the cluster.
    pub(super) fn decode(bits: u64, block: u32) -> Result<Self, String> {
        if bits & !FIELDS != 0 {
            return Err(format!("the descriptor {bits:#018x} has bits outside of its fields"));
        }
        let bytes = |low: u32| ((bits >> low & 0x3FFF) as u32) << 4;
        Ok(Self {
            start: bytes(0) | block << BLOCK_SHIFT,
            leading: bytes(16),
            stride: bytes(32),
            base: (bits >> 49 & 7) as u32,
            width: [CHUNK, 128, 64, 32][(bits >> 62) as usize],
        })
    }

    /// Address of a chunk. K-major: of a row (of A, or a column of B) and a chunk along K. MN-major: of a chunk along M or N
    /// and a place in K.
    pub(super) fn chunk(&self, mn_major: bool, mn: u32, k: u32) -> u32 {
        let Self { leading, stride, width, .. } = *self;
        let (inner, outer) = if mn_major { (k, mn) } else { (mn, k) };
        let (row, pattern) = (inner % PATTERN * width, inner / PATTERN);
        let chunks = width / CHUNK;
        let offset = match (mn_major, width == CHUNK) {
            (false, true) => row + pattern * stride + outer * leading,
            (false, false) => row + pattern * stride + outer * CHUNK,
            (true, true) => row + pattern * leading + outer * stride,
            (true, false) => row + pattern * stride + outer % chunks * CHUNK + outer / chunks * leading,
        };
        let address = self.start + offset;
        address ^ (((address >> 7).wrapping_sub(self.base) & (chunks - 1)) << 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A descriptor, as a kernel puts it together.
    fn bits(start: u64, leading: u64, stride: u64, base: u64, mode: u64) -> u64 {
        start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | mode << 62
    }

    #[test]
    fn fields() {
        let descriptor = Descriptor::decode(bits(0x2_0450, 0x120, 0x3_FFF0, 5, 2), 0).unwrap();
        assert_eq!(descriptor, Descriptor { start: 0x2_0450, leading: 0x120, stride: 0x3_FFF0, base: 5, width: 64 });
        for bit in [14, 15, 30, 31, 46, 47, 48, 52, 61] {
            Descriptor::decode(1 << bit, 0).unwrap_err();
        }
    }

    /// The document's examples (figures 168 to 170), bf16: exact layouts as strides in elements.
    #[test]
    fn examples_of_the_document() {
        // MN-major without swizzle: ((8,1,2),(8,2)):((1,8,64),(8,128)).
        let plain = Descriptor::decode(bits(0x400, 256, 128, 0, 0), 0).unwrap();
        // MN-major 32 bytes: ((8,2,2),(8,2)):((1,8,128),(16,256)), Swizzle<1,4,3>.
        let narrow = Descriptor::decode(bits(0x400, 256, 512, 0, 3), 0).unwrap();
        // MN-major 64 bytes: ((8,4,2),(8,2)):((1,8,256),(32,512)), Swizzle<2,4,3>.
        let middle = Descriptor::decode(bits(0x400, 512, 1024, 0, 2), 0).unwrap();
        let swizzled = |offset: u32, bits: u32| 0x400 + (offset ^ (offset >> 7 & ((1 << bits) - 1)) << 4);
        for k in 0..16 {
            for chunk in 0..2 {
                assert_eq!(plain.chunk(true, chunk, k), 0x400 + 2 * (64 * chunk + k % 8 * 8 + k / 8 * 128));
            }
            for chunk in 0..4 {
                let offset = 2 * (chunk % 2 * 8 + chunk / 2 * 128 + k % 8 * 16 + k / 8 * 256);
                assert_eq!(narrow.chunk(true, chunk, k), swizzled(offset, 1));
            }
            for chunk in 0..8 {
                let offset = 2 * (chunk % 4 * 8 + chunk / 4 * 256 + k % 8 * 32 + k / 8 * 512);
                assert_eq!(middle.chunk(true, chunk, k), swizzled(offset, 2));
            }
        }
        // K-major, in chunks: ((8,m),2k):((1,SBO),LBO) without swizzle, ((8,m),2k):((8,SBO),1) with 128 bytes.
        let plain = Descriptor::decode(bits(0x800, 2048, 128, 0, 0), 0).unwrap();
        let wide = Descriptor::decode(bits(0x800, 16, 1024, 0, 1), 0).unwrap();
        for row in 0..16 {
            for chunk in 0..2 {
                assert_eq!(plain.chunk(false, row, chunk), 0x800 + row % 8 * 16 + row / 8 * 128 + 2048 * chunk);
                let offset = row % 8 * 128 + row / 8 * 1024 + 16 * chunk;
                assert_eq!(wide.chunk(false, row, chunk), 0x800 + (offset ^ (row % 8) << 4));
            }
        }
    }

    #[test]
    fn a_pattern_may_start_anywhere_on_128_bytes() {
        let at_zero = Descriptor::decode(bits(0x800, 16, 1024, 0, 1), 0).unwrap();
        let moved = Descriptor::decode(bits(0x980, 16, 1024, 3, 1), 0).unwrap();
        for row in 0..16 {
            for chunk in 0..2 {
                assert_eq!(moved.chunk(false, row, chunk), at_zero.chunk(false, row, chunk) + 0x180);
            }
        }
    }
}

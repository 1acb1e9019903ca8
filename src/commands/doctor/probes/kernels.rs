//! Each operation of MLX that a model's layers use, on the device, against the same in f64.
//!
//! The inputs are small multiples of 1/128, which every type holds exactly: what differs is the
//! arithmetic's. On a GPU that is done in 16 bits, on a processor in f32.

use anyhow::Context as _;
use serde_json::json;
use shardpack_mlx::{Array, Binary, Element, Library, Quantized};
use shardpack_quantize::{
    AffineFormat, Dtype, Rounding as QuantizeRounding,
    affine::{QuantizeOptions, quantize, unpack, widen},
    simd::Platform,
};

use super::{
    Note, Outcome, is_gpu,
    reference::{self, Expected, Matrix, Rounding},
};
use crate::commands::doctor::report::Finding;

/// An element type with its rounding.
#[derive(Clone, Copy)]
struct Type {
    name: &'static str,
    element: Element,
    dtype: Dtype,
    rounding: Rounding,
    /// Why its bound is what it is.
    bound: &'static str,
}

const F32: Type = Type {
    name: "f32",
    element: Element::F32,
    dtype: Dtype::F32,
    rounding: Rounding { unit: 1.0 / (1 << 24) as f64 },
    bound: "rounding to f32 (2^-24), added up as independent errors, six deviations",
};

const GPU_TYPES: [Type; 2] = [
    Type {
        name: "bf16",
        element: Element::Bf16,
        dtype: Dtype::BF16,
        rounding: Rounding { unit: 1.0 / 256.0 },
        bound: "rounding to bf16 (2^-8), added up as independent errors, six deviations",
    },
    Type {
        name: "f16",
        element: Element::F16,
        dtype: Dtype::F16,
        rounding: Rounding { unit: 1.0 / 2048.0 },
        bound: "rounding to f16 (2^-11), added up as independent errors, six deviations",
    },
];

/// Rows of a product: one is decoding, more are a prompt, for which MLX has other kernels.
const ROWS: [usize; 2] = [1, 40];

const INPUTS: usize = 512;
const OUTPUTS: usize = 128;
const GROUP: usize = 64;
const EXPERTS: usize = 8;

pub(super) fn run(library: Library, note: Note<'_>) {
    let types = if is_gpu(library) { &GPU_TYPES[..] } else { &[F32] };
    for kind in types {
        let device = Kernels { library, kind: *kind };
        let mut add = |name: &str, worst: anyhow::Result<f64>| {
            let name = format!("kernel {name}, {}", kind.name);
            note(&name, Ok(outcome(worst, *kind)));
        };
        for bits in [4, 6, 8] {
            add(&format!("quantized_matmul, {bits} bits"), device.quantized_matmul(bits));
            add(&format!("gather_qmm, {bits} bits"), device.gather_qmm(bits));
        }
        add("rms_norm", device.rms_norm());
        add("rope", device.rope());
        add("attention", device.attention());
    }
}

fn outcome(worst: anyhow::Result<f64>, kind: Type) -> Outcome {
    const ADVICE: &str = "answers of --engine mlx are wrong here: use --engine cpu, and attach this \
                          report to a bug";
    match worst {
        Ok(worst) => {
            let detail = format!("the largest error is {worst:.2} of its bound");
            let found = Finding::new(detail, json!({ "worst": worst }));
            Outcome::Found(found.expected(format!("at most 1: {}", kind.bound)))
        }
        Err(error) => Outcome::Failed(format!("{error:#}"), ADVICE.to_owned()),
    }
}

/// Multiples of 1/128 between −1 and 1, the same on every machine.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 255) as f32 / 128.0 - 127.0 / 128.0
    };
    (0..len).map(|_| next()).collect()
}

struct Kernels {
    library: Library,
    kind: Type,
}

/// Matrices as MLX takes them, and as the reference reads them.
struct Both {
    words: Array,
    scales: Array,
    biases: Array,
    matrix: Matrix,
    bits: u32,
}

impl Both {
    const fn quantized(&self) -> Quantized<'_> {
        let Self { words, scales, biases, bits, .. } = self;
        let (group, bits) = (GROUP as u32, *bits);
        Quantized { words, scales, biases: Some(biases), group, bits, mode: c"affine" }
    }
}

impl Kernels {
    fn array(&self, values: &[f32], shape: &[usize]) -> Array {
        self.library.floats(values, shape).cast(self.kind.element)
    }

    /// A quantized matrix of each expert.
    fn matrices(&self, bits: u32, experts: usize) -> anyhow::Result<Both> {
        let format = AffineFormat::new(bits, GROUP as u32).context("a format of MLX")?;
        let len = experts * OUTPUTS * INPUTS;
        let source: Vec<u8> =
            noise(u64::from(bits), len).iter().flat_map(|it| it.to_le_bytes()).collect();
        let store = self.kind.dtype;
        let groups = len / GROUP;
        let mut packed = vec![0; groups * format.group_bytes()];
        let mut scales = vec![0; groups * self.kind.element.size_bytes()];
        let mut biases = scales.clone();
        let options = QuantizeOptions::new(format, QuantizeRounding::MlxCpu, store);
        quantize(&options, (Dtype::F32, &source), (&mut packed, &mut scales, &mut biases))?;
        let mut integers = vec![0; len];
        for (bytes, q) in packed.chunks(format.group_bytes()).zip(integers.chunks_mut(GROUP)) {
            unpack(format, bytes, q);
        }
        let floats = |bytes: &[u8]| {
            let mut floats = vec![0.0; groups];
            widen(Platform::Portable, store, bytes, &mut floats);
            floats
        };
        let matrix = Matrix {
            integers,
            scales: floats(&scales),
            biases: floats(&biases),
            inputs: INPUTS,
            group: GROUP,
        };
        let shape = |last: usize| match experts {
            1 => vec![OUTPUTS, last],
            _ => vec![experts, OUTPUTS, last],
        };
        let (element, per_row) = (self.kind.element, INPUTS / GROUP);
        let words = INPUTS * bits as usize / 32;
        Ok(Both {
            words: self.library.copy_in(&packed, Element::U32, &shape(words)),
            scales: self.library.copy_in(&scales, element, &shape(per_row)),
            biases: self.library.copy_in(&biases, element, &shape(per_row)),
            matrix,
            bits,
        })
    }

    fn quantized_matmul(&self, bits: u32) -> anyhow::Result<f64> {
        let both = self.matrices(bits, 1)?;
        let mut worst = 0.0_f64;
        for rows in ROWS {
            let x = noise(100, rows * INPUTS);
            let found =
                self.array(&x, &[rows, INPUTS]).quantized_matmul(both.quantized(), true).read()?;
            let expected: Vec<Expected> = x
                .chunks(INPUTS)
                .flat_map(|x| (0..OUTPUTS).map(|it| both.matrix.product(x, it, self.kind.rounding)))
                .collect();
            worst = worst.max(reference::worst(&expected, &found)?);
        }
        Ok(worst)
    }

    /// Some rows with an expert each: in any order, and sorted as for a prompt.
    fn gather_qmm(&self, bits: u32) -> anyhow::Result<f64> {
        const ROWS: usize = 96;
        let both = self.matrices(bits, EXPERTS)?;
        let x = noise(101, ROWS * INPUTS);
        let mut worst = 0.0_f64;
        for is_sorted in [false, true] {
            let mut experts: Vec<u32> =
                (0..ROWS as u32).map(|row| row * 5 % EXPERTS as u32).collect();
            if is_sorted {
                experts.sort_unstable();
            }
            let rhs = self.library.indices(&experts, &[ROWS]);
            let rows = self.array(&x, &[ROWS, 1, INPUTS]);
            let found = rows.gather_quantized(both.quantized(), None, &rhs, is_sorted).read()?;
            let expected: Vec<Expected> = x
                .chunks(INPUTS)
                .zip(&experts)
                .flat_map(|(x, expert)| {
                    let first = *expert as usize * OUTPUTS;
                    let outputs = first..first + OUTPUTS;
                    outputs.map(|it| both.matrix.product(x, it, self.kind.rounding))
                })
                .collect();
            worst = worst.max(reference::worst(&expected, &found)?);
        }
        Ok(worst)
    }

    fn rms_norm(&self) -> anyhow::Result<f64> {
        const ROWS: usize = 7;
        let (x, gain) = (noise(102, ROWS * INPUTS), noise(103, INPUTS));
        let normed =
            self.array(&x, &[ROWS, INPUTS]).rms_norm(Some(&self.array(&gain, &[INPUTS])), 1e-6);
        let expected: Vec<Expected> = x
            .chunks(INPUTS)
            .flat_map(|x| reference::rms_norm(x, &gain, 1e-6, self.kind.rounding))
            .collect();
        reference::worst(&expected, &normed.read()?)
    }

    /// Rotations by slices and products.
    fn rope(&self) -> anyhow::Result<f64> {
        const ROWS: usize = 5;
        const DIM: usize = 64;
        const HALF: usize = DIM / 2;
        let x = noise(104, ROWS * DIM);
        let (cos, sin) = (noise(105, ROWS * HALF), noise(106, ROWS * HALF));
        let rows = self.array(&x, &[ROWS, DIM]);
        let (a, b) = (rows.slice(1, 0, HALF), rows.slice(1, HALF, DIM));
        let (c, s) = (self.array(&cos, &[ROWS, HALF]), self.array(&sin, &[ROWS, HALF]));
        let product = |x: &Array, y: &Array| x.binary(Binary::Multiply, y);
        let first = product(&a, &c).binary(Binary::Subtract, &product(&b, &s));
        let second = product(&b, &c).binary(Binary::Add, &product(&a, &s));
        let found = self.library.concat(&[&first, &second], 1).read()?;
        let tables = cos.chunks(HALF).zip(sin.chunks(HALF));
        let expected: Vec<Expected> = x
            .chunks(DIM)
            .zip(tables)
            .flat_map(|(x, (cos, sin))| reference::rope(x, cos, sin, self.kind.rounding))
            .collect();
        reference::worst(&expected, &found)
    }

    /// Causal attention with fewer heads of keys than of queries, for one row and for several.
    fn attention(&self) -> anyhow::Result<f64> {
        const HEADS: usize = 4;
        const KV_HEADS: usize = 2;
        const KEYS: usize = 33;
        const DIM: usize = 64;
        let (k, v) = (noise(107, KV_HEADS * KEYS * DIM), noise(108, KV_HEADS * KEYS * DIM));
        let shape = [1, KV_HEADS, KEYS, DIM];
        let (keys, values) = (self.array(&k, &shape), self.array(&v, &shape));
        let scale = 1.0 / (DIM as f64).sqrt();
        let mut worst = 0.0_f64;
        for rows in [1, 9] {
            let q = noise(109, HEADS * rows * DIM);
            let queries = self.array(&q, &[1, HEADS, rows, DIM]);
            let found = queries.attention(&keys, &values, scale as f32, None, None).read()?;
            let expected: Vec<Expected> = q
                .chunks(DIM)
                .enumerate()
                .flat_map(|(index, query)| {
                    let (head, row) = (index / rows, index % rows);
                    let first = head * KV_HEADS / HEADS * KEYS * DIM;
                    let part = first..first + KEYS * DIM;
                    let last = KEYS - rows + row;
                    let [k, v] = [&k[part.clone()], &v[part]];
                    reference::attention(query, k, v, last, scale, self.kind.rounding)
                })
                .collect();
            worst = worst.max(reference::worst(&expected, &found)?);
        }
        Ok(worst)
    }
}

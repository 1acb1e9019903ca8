//! A choice of bits as a file: a line for each pattern, as `--override` takes them. The last that matches a
//! matrix decides, so that the first line is for all others.

use std::fmt::Write as _;

use shardpack_manifests::manifest::{MatrixFormat, Quantization};

/// The file beside the packages of a set whose bits were given out.
pub const RECIPE_FILE: &str = "recipe.txt";

/// What [`lines`] reads back: the formats of all matrices. `group_size` is the main one.
#[must_use]
pub fn recipe_file(quantization: &Quantization, group_size: u32) -> String {
    let mut text = String::from(
        "# Bits of every matrix: PATTERN=BITS[:GROUP] or PATTERN=FORMAT, the last line that matches decides.\n\
         # For another model of the same architecture: shardpack convert SOURCE -o OUTPUT --recipe THIS\n",
    );
    let affine = MatrixFormat::Affine { bits: quantization.bits, group_size };
    let main = quantization.float.map_or(affine, MatrixFormat::Float);
    let all = [("*", &main)];
    let others = quantization.overrides.iter().map(|(module, format)| (module.as_str(), format));
    for (module, format) in all.into_iter().chain(others) {
        // Writing to a string cannot fail.
        let _ = match format {
            MatrixFormat::Plain => writeln!(text, "{module}=16"),
            MatrixFormat::Affine { bits, group_size } => {
                writeln!(text, "{module}={bits}:{group_size}")
            }
            MatrixFormat::Float(format) => writeln!(text, "{module}={format}"),
        };
    }
    text
}

/// The overrides of a recipe file: its lines without comments and space.
#[must_use]
pub fn lines(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardpack_quantize::{Dtype, FloatFormat};

    use super::*;
    use crate::recipe::{MainFormat, Overrides};

    #[test]
    fn a_file_says_what_overrides_say() {
        let formats = [
            ("lm_head", MatrixFormat::Affine { bits: 6, group_size: 32 }),
            ("model.layers.0.self_attn.v_proj", MatrixFormat::Plain),
            ("model.layers.0.mlp.down_proj", MatrixFormat::Float(FloatFormat::Mxfp8)),
        ];
        let overrides = formats.map(|(module, format)| (module.to_owned(), format));
        let quantization = Quantization {
            bits: 4,
            group_size: Some(64),
            float: None,
            rounding: None,
            dtype: Dtype::BF16,
            overrides: BTreeMap::from(overrides),
            importance: None,
        };
        let text = recipe_file(&quantization, 64);
        let read = Overrides::parse(&lines(&text)).unwrap();
        let other = MainFormat { bits: 8, group_size: 128, float: None };
        for (module, format) in formats {
            assert_eq!(read.of(module, other), Some(format), "{text}");
        }
        let rest = read.of("model.embed_tokens", other);
        assert_eq!(rest, Some(MatrixFormat::Affine { bits: 4, group_size: 64 }));
        assert_eq!(lines(" a=4 # why\n\n#x\nb=6:32"), ["a=4", "b=6:32"]);
    }
}

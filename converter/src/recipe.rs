//! Bits of every matrix: ready recipes (`--recipe`) and the user's own exceptions
//! (`--override`), or what a budget gives out. Knows names, layers and roles; no shapes, no weights and no ranks, so what it
//! says holds for any number of nodes.
//!
//! A recipe decides by layer and kind of matrix, then overrides apply. Whether a group size fits a
//! matrix's width is decided by the plan.

mod budget;
mod file;
mod pattern;
#[cfg(test)]
mod tests;

use std::{fmt, str::FromStr};

use shardpack_formats::Role;
use shardpack_manifests::manifest::MatrixFormat;
use shardpack_quantize::{AffineFormat, FloatFormat};

pub use budget::Budget;
pub(crate) use budget::{FormatCost, give_out};
pub use file::{RECIPE_FILE, lines, recipe_file};
use pattern::Pattern;

/// Longest pattern in bytes: module names have under 100.
const MAX_PATTERN_BYTES: usize = 256;

/// Least bits of a sparse-attention indexer: another top-k key is no small error, and indexers are
/// a few thousandths of a model. Publishers store it in 8 bits too.
const INDEXER_BITS: u32 = 8;

/// Bits that mean "not quantized".
const PLAIN_BITS: u32 = 16;

/// A recipe or an override that cannot be honoured.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecipeError {
    /// No recipe of this name.
    #[error("recipe {found:?} is no file, and neither uniform nor sensitive")]
    Name {
        /// What was asked.
        found: String,
    },
    /// Neither `pattern=bits[:group]` nor `pattern=format`.
    #[error(
        "override {text:?}: {problem}; write 'pattern=bits[:group]', such as '*.down_proj=6', or \
         'pattern=format' with mxfp4, nvfp4 or mxfp8"
    )]
    Syntax {
        /// What was given.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// It names no matrix of the model.
    #[error(
        "override {text:?} matches no matrix of this model; its matrices are named like {example:?}"
    )]
    Unmatched {
        /// What was given.
        text: String,
        /// A module that could have been named.
        example: String,
    },
}

/// A ready choice of bits by layer and kind of matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recipe {
    /// Every matrix at the main bits, except a sparse-attention indexer: 8 at least, in every
    /// recipe.
    #[default]
    Uniform,
    /// More bits where rounding hurts most: `down_proj` and `v_proj` of the first and the last
    /// eighth of the layers one step up (4 → 6, 6 → 8), LM head and embedding at 6 at least.
    ///
    /// This is the core of what llama.cpp's `Q4_K_M` and mlx-lm's `mixed_4_6` do, which add every
    /// third layer in between. Those two kinds of matrices pass their error on most directly:
    /// values are summed over positions as they are, and `down_proj` has the widest inputs with
    /// the largest outliers. First and last layers lie next to the embedding and the logits.
    Sensitive,
}

impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        match text {
            "uniform" => Ok(Self::Uniform),
            "sensitive" => Ok(Self::Sensitive),
            _ => Err(RecipeError::Name { found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Uniform => "uniform",
            Self::Sensitive => "sensitive",
        })
    }
}

/// A matrix as recipes see it.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Its module: the tensor's name without `.weight`.
    pub module: &'a str,
    /// Its layer, if it belongs to one.
    pub layer: Option<u32>,
    /// What it is for.
    pub role: Role,
}

/// The choice for everything that nothing else is said of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MainFormat {
    /// Bits per weight; 16 for not quantized.
    pub bits: u32,
    /// Weights per affine group; also of what an override quantizes in a model of 16 bits, and of
    /// what gets other bits than the float groups of `float`.
    pub group_size: u32,
    /// Float groups, of as many bits.
    pub float: Option<FloatFormat>,
}

impl MainFormat {
    /// The same as a stored format.
    #[must_use]
    pub const fn stored(self) -> MatrixFormat {
        self.with_bits(self.bits)
    }

    /// The same format with other bits: affine groups, where the main ones are float groups.
    const fn with_bits(self, bits: u32) -> MatrixFormat {
        match self.float {
            Some(format) if format.bits() == bits => MatrixFormat::Float(format),
            _ if bits >= PLAIN_BITS => MatrixFormat::Plain,
            _ => MatrixFormat::Affine { bits, group_size: self.group_size },
        }
    }
}

impl Recipe {
    /// The format of a matrix in a model of `layers` layers.
    #[must_use]
    pub fn format(self, matrix: &Matrix, layers: u32, main: MainFormat) -> MatrixFormat {
        if main.bits >= PLAIN_BITS {
            return main.stored();
        }
        if matrix.role == Role::Indexer {
            return main.with_bits(main.bits.max(INDEXER_BITS));
        }
        if self == Self::Uniform {
            return main.stored();
        }
        let kind = matrix.module.rsplit('.').next().unwrap_or_default();
        let bits = match matrix.role {
            Role::Head | Role::Embed => main.bits.max(6),
            Role::Linear if matches!(kind, "down_proj" | "v_proj") => {
                let outer = matrix.layer.is_some_and(|layer| is_outer(layer, layers));
                if outer { one_step_up(main.bits) } else { main.bits }
            }
            Role::Linear | Role::Norm | Role::Bias | Role::Router | Role::Indexer => main.bits,
        };
        main.with_bits(bits)
    }
}

/// Whether a layer is in the first or the last eighth; each has at least one layer.
const fn is_outer(layer: u32, layers: u32) -> bool {
    let eighth = layers.div_ceil(8);
    layer < eighth || layer >= layers.saturating_sub(eighth)
}

/// The next size that is worth its bytes: 5 and 7 bits pack badly and gain little over 4 and 6.
const fn one_step_up(bits: u32) -> u32 {
    match bits {
        0..=3 => 4,
        4 | 5 => 6,
        _ => 8,
    }
}

/// The user's exceptions, in the order in which they were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(Vec<Override>);

/// `pattern=bits[:group]` or `pattern=format`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Override {
    text: String,
    pattern: Pattern,
    wanted: Wanted,
}

/// What an override asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Affine groups, or 16 bits; the main group size if there is none.
    Bits { bits: u32, group_size: Option<u32> },
    /// Float groups.
    Float(FloatFormat),
}

impl Overrides {
    /// Parses overrides: `pattern=bits`, `pattern=bits:group` or `pattern=format`.
    ///
    /// In a pattern `*` stands for any characters (dots too) and `?` for one; it has to match the
    /// whole module name. 16 bits mean not quantized.
    pub fn parse<T: AsRef<str>>(texts: &[T]) -> Result<Self, RecipeError> {
        texts.iter().map(|text| text.as_ref().parse()).collect::<Result<_, _>>().map(Self)
    }

    /// The format of a module that a recipe has given `chosen`: that of the last override that
    /// matches.
    #[must_use]
    pub fn format(&self, module: &str, chosen: MatrixFormat, main: MainFormat) -> MatrixFormat {
        self.of(module, main).unwrap_or(chosen)
    }

    /// That of the last override that matches a module, if one does.
    #[must_use]
    pub fn of(&self, module: &str, main: MainFormat) -> Option<MatrixFormat> {
        let last = self.0.iter().rev().find(|exception| exception.pattern.matches(module));
        last.map(|exception| match exception.wanted {
            Wanted::Float(format) => MatrixFormat::Float(format),
            Wanted::Bits { bits, group_size } => {
                let group_size = group_size.unwrap_or(main.group_size);
                MainFormat { bits, group_size, float: None }.stored()
            }
        })
    }

    /// Refuses an override that none of the model's quantizable `modules` match: a misspelt name
    /// would otherwise silently do nothing.
    pub fn check_used(&self, modules: &[&str]) -> Result<(), RecipeError> {
        let is_used =
            |exception: &&Override| modules.iter().any(|module| exception.pattern.matches(module));
        match self.0.iter().find(|exception| !is_used(exception)) {
            None => Ok(()),
            Some(exception) => Err(RecipeError::Unmatched {
                text: exception.text.clone(),
                // One inside a layer shows more of how names are built than the embedding.
                example: (*modules.get(1).or(modules.first()).unwrap_or(&"")).to_owned(),
            }),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Override {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let wrong = |problem: String| RecipeError::Syntax { text: text.to_owned(), problem };
        let (pattern, format) =
            text.rsplit_once('=').ok_or_else(|| wrong("it has no '='".to_owned()))?;
        if pattern.is_empty() || pattern.len() > MAX_PATTERN_BYTES {
            return Err(wrong(format!("a pattern has 1 to {MAX_PATTERN_BYTES} bytes")));
        }
        let taken = |wanted| {
            let (text, pattern) = (text.to_owned(), Pattern::new(pattern));
            Ok(Self { text, pattern, wanted })
        };
        if let Ok(format) = format.parse() {
            return taken(Wanted::Float(format));
        }
        let (bits, group_size) = match format.split_once(':') {
            Some((bits, group_size)) => (bits, Some(group_size)),
            None => (format, None),
        };
        let number = |text: &str| {
            text.parse::<u32>().map_err(|_| wrong(format!("{text:?} is not a number")))
        };
        let bits = number(bits)?;
        let group_size = group_size.map(number).transpose()?;
        if bits == PLAIN_BITS && group_size.is_some() {
            return Err(wrong("16 bits are not quantized and have no groups".to_owned()));
        }
        if bits != PLAIN_BITS && AffineFormat::new(bits, 64).is_none() {
            return Err(wrong(format!("{bits} bits are not possible; 2 to 6, 8 and 16 are")));
        }
        if let Some(group_size) = group_size.filter(|size| AffineFormat::new(8, *size).is_none()) {
            return Err(wrong(format!(
                "groups of {group_size} are not possible; 32, 64 and 128 are"
            )));
        }
        taken(Wanted::Bits { bits, group_size })
    }
}

//! Figures of `eval` as a table, as Markdown and as JSON.

use std::{fmt::Write as _, path::Path};

use serde_json::{Value, json};
use shardpack_engine::eval::{Divergence, Estimate, EvalOptions, Evaluation, Evaluations};
use shardpack_manifests::Manifest;
use shardpack_quantize::Dtype;

use super::inputs::Texts;
use crate::progress::{size, table};

/// One set's figures.
pub(super) struct Row {
    /// The set as it was given.
    pub(super) set: String,
    /// Its last part.
    pub(super) name: String,
    /// Bytes of all tensors.
    pub(super) bytes: u64,
    /// Bits that a weight takes, scales and unquantized tensors included.
    pub(super) bits_per_weight: f64,
    /// What was found.
    pub(super) found: Evaluations,
    /// The same with activations in 32 bits, if that was asked for.
    pub(super) exact: Option<Evaluations>,
}

impl Row {
    pub(super) fn new(
        given: &Path,
        manifests: &[Manifest],
        found: Evaluations,
        exact: Option<Evaluations>,
    ) -> Self {
        let (bytes, weights) = weights(manifests);
        let name = given.file_name().unwrap_or(given.as_os_str()).to_string_lossy().into_owned();
        let bits_per_weight = bytes as f64 * 8.0 / (weights as f64).max(1.0);
        Self { set: given.display().to_string(), name, bytes, bits_per_weight, found, exact }
    }

    /// The mean KL divergence from the reference.
    pub(super) fn kl(&self) -> Option<f64> {
        self.found.all.against.as_ref().map(|against| against.kl_mean.value)
    }
}

/// Bytes of all ranks' tensors, and how many weights they are: scales and biases of groups are bytes
/// of the weights that they belong to.
fn weights(manifests: &[Manifest]) -> (u64, u64) {
    let (mut bytes, mut weights) = (0, 0);
    for manifest in manifests {
        for tensor in &manifest.tensors {
            bytes += tensor.size;
            let elements: u64 = tensor.shape.iter().product();
            let (module, part) = tensor.name.rsplit_once('.').unwrap_or(("", &tensor.name));
            weights += match manifest.quantization.format_of(module).groups() {
                Some((bits, _)) if tensor.dtype == Dtype::U32 => elements * 32 / u64::from(bits),
                Some(_) if matches!(part, "scales" | "biases") => 0,
                _ => elements,
            };
        }
    }
    (bytes, weights)
}

/// Everything that was found.
pub(super) struct Report<'a> {
    pub(super) options: &'a EvalOptions,
    pub(super) texts: &'a Texts,
    pub(super) rows: &'a [Row],
}

impl Report<'_> {
    /// For a terminal.
    pub(super) fn text(&self) -> String {
        match self.rows {
            [row] => self.details(row),
            _ => format!("{}\n\n{}", self.read(), table(&self.cells()).trim_end()),
        }
    }

    /// What was read, in a line.
    fn read(&self) -> String {
        let (mut tokens, mut windows) = (0, 0);
        if let Some(row) = self.rows.first() {
            (tokens, windows) = (row.found.all.tokens, row.found.all.windows);
        }
        let names: Vec<_> = self.texts.stored.iter().map(|text| text.name.as_str()).collect();
        let context = self.options.context;
        format!("{tokens} tokens in {windows} windows of {context}, of {}", names.join(", "))
    }

    /// A row for each set below the names of columns.
    fn cells(&self) -> Vec<Vec<String>> {
        let compared = self.rows.iter().any(|row| row.found.all.against.is_some());
        let terms = compared && self.rows.iter().any(|row| row.exact.is_some());
        let mut names = vec!["set", "bits per weight", "size", "perplexity"];
        if compared {
            names.extend(["KL mean", "median", "99.9 %", "same top token"]);
        }
        if terms {
            names.extend(["KL of weights", "of activations"]);
        }
        names.push("tokens/s");
        let mut cells = vec![names.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        for row in self.rows {
            let mut line = vec![
                row.set.clone(),
                format!("{:.3}", row.bits_per_weight),
                size(row.bytes),
                plain(&row.found.all.perplexity),
            ];
            if let Some(against) = &row.found.all.against {
                line.extend([
                    format!("{:.6} ± {:.6}", against.kl_mean.value, against.kl_mean.error),
                    format!("{:.6}", against.kl.median),
                    format!("{:.6}", against.kl.p999),
                    format!("{:.2} %", against.same_top.value * 100.0),
                ]);
            }
            if terms {
                let [weights, activations] = kl_terms(row).unwrap_or([f64::NAN; 2]);
                line.extend([format!("{weights:.6}"), format!("{activations:+.6}")]);
            }
            line.push(format!("{:.0}", row.found.tokens_per_second));
            cells.push(line);
        }
        cells
    }

    fn details(&self, row: &Row) -> String {
        let found = &row.found.all;
        let mut lines = vec![
            format!("tokens            {}", self.read()),
            format!("weights           {}, {:.3} bits each", size(row.bytes), row.bits_per_weight),
            format!("tokens/s          {:.0}", row.found.tokens_per_second),
            format!("perplexity        {}", plain(&found.perplexity)),
        ];
        if let Some(against) = &found.against {
            lines.extend(divergence(found, against));
        }
        if let [_, _, ..] = row.found.texts[..] {
            for (text, found) in self.texts.stored.iter().zip(&row.found.texts) {
                let mut line =
                    format!("  {:<16}perplexity {}", text.name, plain(&found.perplexity));
                if let Some(against) = &found.against {
                    // Writing to a string cannot fail, here and below.
                    let _ = write!(line, ", KL mean {:.6}", against.kl_mean.value);
                }
                lines.push(line);
            }
        }
        lines.extend(terms(row));
        lines.join("\n")
    }

    /// As a Markdown document.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# Evaluation\n\n{}.\n\n", self.read());
        for (index, cells) in self.cells().iter().enumerate() {
            let escaped: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            let _ = writeln!(text, "| {} |", escaped.join(" | "));
            if index == 0 {
                let _ = writeln!(text, "|{}", "---|".repeat(cells.len()));
            }
        }
        text.push_str(
            "\nBits per weight count all weights, embeddings and norms too, and the scales of groups. \
             Tokens/s are those of reading the text on this machine.\n",
        );
        if let [first, ..] = self.rows
            && let [_, _, ..] = first.found.texts[..]
        {
            text.push_str(
                "\n## Each text\n\n| set | text | perplexity | KL mean |\n|---|---|---|---|\n",
            );
            for row in self.rows {
                for (stored, found) in self.texts.stored.iter().zip(&row.found.texts) {
                    let kl = found.against.as_ref();
                    let kl = kl.map_or_else(String::new, |it| format!("{:.6}", it.kl_mean.value));
                    let (set, name) = (&row.set, &stored.name);
                    let _ =
                        writeln!(text, "| {set} | {name} | {} | {kl} |", plain(&found.perplexity));
                }
            }
        }
        text
    }

    /// For machines.
    pub(super) fn json(&self) -> Value {
        let sets: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let mut value = json!(row.found.all);
                value["set"] = json!(row.set);
                value["bytes"] = json!(row.bytes);
                value["bits_per_weight"] = json!(row.bits_per_weight);
                value["tokens_per_second"] = json!(row.found.tokens_per_second);
                value["texts"] = json!(row.found.texts);
                if let Some(exact) = &row.exact {
                    value["exact_activations"] = json!(exact.all);
                }
                value
            })
            .collect();
        json!({ "context": self.options.context, "texts": self.texts.stored, "sets": sets })
    }
}

fn plain(it: &Estimate) -> String {
    format!("{:.4} ± {:.4}", it.value, it.error)
}

fn divergence(found: &Evaluation, against: &Divergence) -> Vec<String> {
    let percent = |it: &Estimate| format!("{:.3} ± {:.3} %", it.value * 100.0, it.error * 100.0);
    let ratio = found.perplexity.value / against.perplexity.value;
    let mut lines = vec![
        format!("  of the other    {} (ratio {ratio:.4})", plain(&against.perplexity)),
        format!(
            "KL divergence     mean {:.6} ± {:.6}",
            against.kl_mean.value, against.kl_mean.error
        ),
        format!("  median          {:.6}", against.kl.median),
        format!("  99 %            {:.6}", against.kl.p99),
        format!("  99.9 %          {:.6}", against.kl.p999),
        format!("  maximum         {:.6}", against.kl.maximum),
        format!("same top token    {}", percent(&against.same_top)),
        format!("RMS Δp            {:.3} %", against.rms_probability_difference * 100.0),
    ];
    if let Some(rest) = against.rest {
        lines.push(format!(
            "only as a sum     {:.4} % of the probability, in the mean",
            rest * 100.0
        ));
    }
    lines
}

/// The KL divergence with exact activations, and what 8 bits of them add.
fn kl_terms(row: &Row) -> Option<[f64; 2]> {
    let exact = row.exact.as_ref()?.all.against.as_ref()?.kl_mean.value;
    Some([exact, row.kl()? - exact])
}

fn terms(row: &Row) -> Vec<String> {
    let Some(exact) = &row.exact else { return Vec::new() };
    let [weights, all] = [exact, &row.found].map(|it| it.all.perplexity.value);
    let mut of = [format!("perplexity {weights:.4}"), format!("{:+.4}", all - weights)];
    if let Some([weights, activations]) = kl_terms(row) {
        let _ = write!(of[0], ", KL mean {weights:.6}");
        let _ = write!(of[1], ", {activations:+.6}");
    }
    let [weights, activations] = of;
    vec![
        format!("of weights        {weights}"),
        format!("of activations    {activations} (rounded to 8 bits)"),
    ]
}

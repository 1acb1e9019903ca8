//! Error by layer, drawn with block characters.

use std::collections::BTreeMap;

use super::{Errors, Measured, root_mean_square};

/// Characters of the longest bar.
const BAR_WIDTH: usize = 32;

/// Bars of less than one character, in eighths.
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// One line per layer, and one per matrix outside of layers.
pub(super) fn by_layer(errors: &Errors) -> Vec<String> {
    let mut rows: BTreeMap<(bool, u32, &str), Vec<&Measured>> = BTreeMap::new();
    for measured in &errors.0 {
        let key = match measured.module.layer {
            Some(layer) => (false, layer, ""),
            None => (true, 0, measured.module.kind),
        };
        rows.entry(key).or_default().push(measured);
    }
    let rows: Vec<(String, f64, &Measured)> = rows
        .into_iter()
        .filter_map(|((_, layer, kind), matrices)| {
            let label = if kind.is_empty() { layer.to_string() } else { kind.to_owned() };
            let error = root_mean_square(matrices.iter().map(|matrix| matrix.rmse));
            // The first of equals.
            let worst = matrices.into_iter().rev().max_by(|a, b| a.rmse.total_cmp(&b.rmse))?;
            Some((label, error, worst))
        })
        .collect();
    let longest = rows.iter().map(|(label, ..)| label.chars().count()).max().unwrap_or(0);
    let largest = rows.iter().fold(0.0, |largest, (_, error, _)| f64::max(largest, *error));
    let mut lines = vec![
        "Relative error (root of squared error over squared weights): the mean of each layer's \
         matrices, and its worst one."
            .to_owned(),
        String::new(),
        "```text".to_owned(),
    ];
    for (label, error, worst) in rows {
        let bar = bar(error, largest);
        let worst = match worst.module.layer {
            Some(_) => format!("  {:.4} {}", worst.rmse, worst.module.kind),
            None => String::new(),
        };
        let line = format!("{label:>longest$}  {error:.4}  {bar:BAR_WIDTH$}{worst}");
        lines.push(line.trim_end().replace('`', "'"));
    }
    lines.push("```".to_owned());
    lines
}

/// A bar of `value` where `largest` is [`BAR_WIDTH`] characters long.
fn bar(value: f64, largest: f64) -> String {
    let share = if largest > 0.0 { value / largest } else { 0.0 };
    let eighths = (share * (BAR_WIDTH * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_end_at_an_eighth_of_a_character() {
        assert_eq!(bar(1.0, 1.0), "█".repeat(32));
        assert_eq!(bar(0.5, 1.0), "█".repeat(16));
        assert_eq!(bar(1.0 / 64.0, 1.0), "▌");
        assert_eq!(bar(33.0 / 256.0, 1.0), "████▏");
        assert_eq!((bar(0.0, 1.0), bar(0.0, 0.0)), (String::new(), String::new()));
    }
}

//! Metrics as text: families are put together from several sources, since a family may stand in a text only
//! once. Reads what Prometheus reads, as far as it must to add a label.

use std::{collections::HashMap, fmt::Write as _};

/// A text under way.
#[derive(Default)]
pub(super) struct Exposition {
    families: Vec<Family>,
    by_name: HashMap<String, usize>,
}

#[derive(Default)]
struct Family {
    /// Lines that begin with `#`.
    head: Vec<String>,
    samples: Vec<String>,
}

impl Exposition {
    /// Adds a gauge, if it has a value.
    pub(super) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        labels: &[(&str, &str)],
        value: Option<f64>,
    ) {
        let Some(value) = value else { return };
        let family = self.family(name);
        if family.head.is_empty() {
            family.head = vec![format!("# HELP {name} {help}"), format!("# TYPE {name} gauge")];
        }
        let labels: Vec<String> =
            labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        family.samples.push(format!("{name}{{{}}} {value}", labels.join(",")));
    }

    /// Adds another text; `node` says of which node a sample is, by its label `rank` if it has one.
    pub(super) fn add<'a>(&mut self, text: &str, node: impl Fn(Option<&str>) -> &'a str) {
        let mut current = String::new();
        for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.split(' ');
                // `# EOF` ends the text.
                if let (Some("HELP" | "TYPE" | "UNIT"), Some(name)) = (words.next(), words.next()) {
                    name.clone_into(&mut current);
                    let head = &mut self.family(name).head;
                    if !head.iter().any(|known| known == line) {
                        head.push(line.to_owned());
                    }
                }
                continue;
            }
            let end = line.find(['{', ' ']).unwrap_or(line.len());
            let (name, rest) = line.split_at(end);
            // Samples of counters and histograms have their family's name and a suffix.
            let family = if !current.is_empty() && name.starts_with(&current) {
                current.clone()
            } else {
                name.to_owned()
            };
            let labels = rest.strip_prefix('{').unwrap_or("");
            let label = format!("node=\"{}\"", escaped(node(label(labels, "rank"))));
            let sample = match rest.strip_prefix('{') {
                Some(rest) if rest.starts_with('}') => format!("{name}{{{label}{rest}"),
                Some(rest) => format!("{name}{{{label},{rest}"),
                None => format!("{name}{{{label}}}{rest}"),
            };
            self.family(&family).samples.push(sample);
        }
    }

    /// The text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in
            self.families.iter().flat_map(|family| family.head.iter().chain(&family.samples))
        {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{line}");
        }
        text.push_str("# EOF\n");
        text
    }

    fn family(&mut self, name: &str) -> &mut Family {
        let next = self.families.len();
        let index = *self.by_name.entry(name.to_owned()).or_insert(next);
        if index == next {
            self.families.push(Family::default());
        }
        &mut self.families[index]
    }
}

/// The value of a label that has nothing to escape.
fn label<'a>(labels: &'a str, wanted: &str) -> Option<&'a str> {
    let mut rest = labels;
    loop {
        let (key, after) = rest.split_once("=\"")?;
        let mut escaped = false;
        let end = after.find(|c| {
            let is_end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        })?;
        if key == wanted {
            return Some(&after[..end]);
        }
        rest = after[end + 1..].strip_prefix(',')?;
    }
}

/// A label's value between its quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_of_several_texts_stand_together_with_their_nodes() {
        let text = "# HELP a A thing.\n# TYPE a gauge\na{model_name=\"m\",rank=\"1\"} 5\na 7\n\
                    # HELP b B.\n# TYPE b counter\nb_total{x=\"rank=\\\"0\\\",\",rank=\"0\"} 1\n# EOF\n";
        let mut all = Exposition::default();
        all.gauge("up", "Up.", &[("node", "x\"y")], Some(1.0));
        all.gauge("up", "Up.", &[("node", "z")], None);
        for front in ["f", "g"] {
            all.add(text, |rank| match rank {
                Some("0") => "zero",
                Some(_) => "one",
                None => front,
            });
        }
        let expected = "# HELP up Up.\n# TYPE up gauge\nup{node=\"x\\\"y\"} 1\n\
            # HELP a A thing.\n# TYPE a gauge\n\
            a{node=\"one\",model_name=\"m\",rank=\"1\"} 5\na{node=\"f\"} 7\n\
            a{node=\"one\",model_name=\"m\",rank=\"1\"} 5\na{node=\"g\"} 7\n\
            # HELP b B.\n# TYPE b counter\n\
            b_total{node=\"zero\",x=\"rank=\\\"0\\\",\",rank=\"0\"} 1\n\
            b_total{node=\"zero\",x=\"rank=\\\"0\\\",\",rank=\"0\"} 1\n# EOF\n";
        assert_eq!(all.text(), expected);
    }
}

//! Patterns of names: `*` for any characters, `?` for one.

/// A pattern that has to match a whole name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern(Vec<char>);

impl Pattern {
    pub(super) fn new(text: &str) -> Self {
        Self(text.chars().collect())
    }

    /// Whether `name` is of this pattern, in time of at most the product of both lengths: of
    /// several stars only the last one met is ever tried again, because an earlier one that takes
    /// less leaves the later ones no worse off.
    pub(super) fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut at, mut in_name) = (0, 0);
        // Where to go on when the characters after a star turn out not to fit.
        let mut retry: Option<(usize, usize)> = None;
        while in_name < name.len() {
            match self.0.get(at) {
                Some('*') => {
                    retry = Some((at + 1, in_name));
                    at += 1;
                }
                Some(expected) if *expected == '?' || *expected == name[in_name] => {
                    at += 1;
                    in_name += 1;
                }
                _ => {
                    let Some((after_star, taken)) = retry else { return false };
                    retry = Some((after_star, taken + 1));
                    (at, in_name) = (after_star, taken + 1);
                }
            }
        }
        self.0[at..].iter().all(|rest| *rest == '*')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, name: &str, expected: bool) {
        assert_eq!(Pattern::new(pattern).matches(name), expected, "{pattern} {name}");
    }

    #[test]
    fn stars_take_any_characters_and_question_marks_one() {
        check("lm_head", "lm_head", true);
        check("lm_head", "lm_heads", false);
        check("lm_head", "model.lm_head", false);
        check("*.down_proj", "model.layers.10.mlp.down_proj", true);
        check("*.layers.?.*", "model.layers.1.mlp.down_proj", true);
        check("*.layers.?.*", "model.layers.10.mlp.down_proj", false);
        check("*.layers.1*.mlp*proj", "model.layers.10.mlp.down_proj", true);
        check("*", "", true);
        check("**", "a", true);
        check("?", "", false);
        check("?", "é", true);
        check("", "", true);
        check("", "a", false);
        check("a*b*c", "a-b-b-c", true);
        check("a*b*c", "a-c-b", false);
        check("*ab", "aab", true);
        check("*aab", "aaab", true);
    }

    #[test]
    fn many_stars_end_soon() {
        check(&"a*".repeat(100), &"a".repeat(10_000), true);
        check(&("*a".repeat(100) + "b"), &"a".repeat(10_000), false);
    }
}

//! Who a rank is, and whether several belong together. No I/O.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// What a rank holds and how it works; all of it comes from its package and its program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The model, with its tokenizer and template.
    pub model_id: String,
    /// The model and its sharding.
    pub layout_id: String,
    /// The rank, `0..ranks`.
    pub rank: u32,
    /// Ranks of the set.
    pub ranks: u32,
    /// Version and build of the program; engines of different ones may differ in bits.
    pub engine_version: String,
    /// Version of the messages between front and ranks.
    pub protocol: u32,
}

/// Why ranks do not form a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// A node differs from most others in something that all must share.
    #[error("{node} has {what} {found}, the others have {expected}{}", remedy(what))]
    Odd {
        /// The node that differs.
        node: String,
        /// What differs: `model`, `layout`, `engine version`, `protocol version`.
        what: &'static str,
        /// The others' value.
        expected: String,
        /// The node's value.
        found: String,
    },
    /// A node's package was sharded for another number of nodes.
    #[error(
        "{node} holds rank {rank} of {found}, the others are of a {expected}-node set of the model"
    )]
    OtherSet {
        /// The node that differs.
        node: String,
        /// The rank it holds.
        rank: u32,
        /// Ranks of its set.
        found: u32,
        /// Ranks of the others' set.
        expected: u32,
    },
    /// A rank outside its set.
    #[error("{node} claims rank {rank} of {ranks}, and ranks count from 0")]
    Impossible {
        /// The node.
        node: String,
        /// Its rank.
        rank: u32,
        /// Ranks of its set.
        ranks: u32,
    },
    /// Two nodes hold the same package.
    #[error("{first} and {second} both hold rank {rank} of {ranks}")]
    Twice {
        /// A node.
        first: String,
        /// The other.
        second: String,
        /// The rank that both hold.
        rank: u32,
        /// Ranks of the set.
        ranks: u32,
    },
    /// A package has no node.
    #[error("no node holds rank {rank} of {ranks}")]
    Missing {
        /// The rank.
        rank: u32,
        /// Ranks of the set.
        ranks: u32,
    },
}

/// What to do about a difference, if that is always the same.
fn remedy(what: &str) -> &'static str {
    match what {
        "engine version" | "protocol version" => {
            ": ranks of a group run one build; `shardpack cluster upgrade` brings this machine's to all nodes"
        }
        _ => "",
    }
}

/// Digits of an id that are shown: enough to tell any two apart by eye.
const SHOWN_DIGITS: usize = 12;

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_DIGITS).collect()
}

/// A property of all ranks of a group.
type Shared = (&'static str, fn(&Identity) -> String);

const SHARED: [Shared; 3] = [
    ("protocol version", |it| it.protocol.to_string()),
    ("engine version", |it| it.engine_version.clone()),
    ("model", |it| it.model_id.clone()),
];

/// Checks that named nodes make one group; returns the index of each rank's node.
pub(super) fn check_group(nodes: &[(&str, &Identity)]) -> Result<Vec<usize>, IdentityError> {
    if nodes.is_empty() {
        return Err(IdentityError::Missing { rank: 0, ranks: 0 });
    }
    for shared in SHARED {
        check_shared(nodes, shared)?;
    }
    let ranks = |it: &Identity| it.ranks;
    let expected = majority(nodes, ranks);
    if let Some((node, it)) = nodes.iter().find(|(_, it)| it.ranks != expected) {
        let (node, rank, found) = ((*node).to_owned(), it.rank, it.ranks);
        return Err(IdentityError::OtherSet { node, rank, found, expected });
    }
    check_shared(nodes, ("layout", |it| it.layout_id.clone()))?;
    let mut holders: HashMap<u32, usize> = HashMap::new();
    for (index, (node, it)) in nodes.iter().enumerate() {
        let (node, rank, ranks) = ((*node).to_owned(), it.rank, it.ranks);
        if rank >= ranks {
            return Err(IdentityError::Impossible { node, rank, ranks });
        }
        if let Some(first) = holders.insert(rank, index) {
            let (first, second) = (nodes[first].0.to_owned(), node);
            return Err(IdentityError::Twice { first, second, rank, ranks });
        }
    }
    // Stops at the first gap, so a hostile number of ranks is not counted to.
    (0..expected)
        .map(|rank| {
            let missing = IdentityError::Missing { rank, ranks: expected };
            holders.get(&rank).copied().ok_or(missing)
        })
        .collect()
}

fn check_shared(nodes: &[(&str, &Identity)], (what, of): Shared) -> Result<(), IdentityError> {
    let expected = majority(nodes, of);
    match nodes.iter().find(|(_, it)| of(it) != expected) {
        None => Ok(()),
        Some((node, it)) => Err(IdentityError::Odd {
            node: (*node).to_owned(),
            what,
            expected: shown(&expected),
            found: shown(&of(it)),
        }),
    }
}

/// The value that most nodes have; of several, the first node's.
fn majority<T: PartialEq + Default>(nodes: &[(&str, &Identity)], of: fn(&Identity) -> T) -> T {
    let values: Vec<T> = nodes.iter().map(|(_, it)| of(it)).collect();
    let count = |value: &T| values.iter().filter(|other| *other == value).count();
    let most = values.iter().map(count).max().unwrap_or(0);
    let first = values.iter().position(|value| count(value) == most);
    first.and_then(|index| values.into_iter().nth(index)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: u32, ranks: u32) -> Identity {
        Identity {
            model_id: "m".repeat(64),
            layout_id: format!("{ranks}").repeat(64),
            rank,
            ranks,
            engine_version: "0.1.0".to_owned(),
            protocol: 1,
        }
    }

    fn group(identities: &[Identity]) -> Result<Vec<usize>, IdentityError> {
        let names = ["a", "b", "c", "d"];
        check_group(&names.into_iter().zip(identities).collect::<Vec<_>>())
    }

    fn check(identities: &[Identity], expected: &str) {
        assert_eq!(group(identities).unwrap_err().to_string(), expected);
    }

    #[test]
    fn ranks_are_ordered_whatever_the_order_of_nodes() {
        assert_eq!(group(&[identity(0, 1)]), Ok(vec![0]));
        let identities = [identity(2, 3), identity(0, 3), identity(1, 3)];
        assert_eq!(group(&identities), Ok(vec![1, 2, 0]));
    }

    #[test]
    fn ranks_that_do_not_belong_together_are_named() {
        let (zero, one, two) = (identity(0, 3), identity(1, 3), identity(2, 3));
        check(
            &[zero.clone(), identity(1, 2), two.clone()],
            "b holds rank 1 of 2, the others are of a 3-node set of the model",
        );
        check(&[zero.clone(), two.clone(), two.clone()], "b and c both hold rank 2 of 3");
        check(&[zero.clone(), two.clone()], "no node holds rank 1 of 3");
        check(&[], "no node holds rank 0 of 0");
        check(
            &[identity(3, 3), one.clone(), two.clone()],
            "a claims rank 3 of 3, and ranks count from 0",
        );
        check(&[identity(0, u32::MAX)], "no node holds rank 1 of 4294967295");
        let odd = |change: fn(&mut Identity), expected: &str| {
            let mut odd = one.clone();
            change(&mut odd);
            check(&[zero.clone(), odd, two.clone()], expected);
        };
        odd(
            |it| it.model_id = "x".repeat(64),
            "b has model xxxxxxxxxxxx, the others have mmmmmmmmmmmm",
        );
        odd(
            |it| it.layout_id = "y".repeat(64),
            "b has layout yyyyyyyyyyyy, the others have 333333333333",
        );
        odd(
            |it| it.engine_version = "0.2.0".to_owned(),
            "b has engine version 0.2.0, the others have 0.1.0: ranks of a group run one build; \
             `shardpack cluster upgrade` brings this machine's to all nodes",
        );
        odd(
            |it| it.protocol = 2,
            "b has protocol version 2, the others have 1: ranks of a group run one build; \
             `shardpack cluster upgrade` brings this machine's to all nodes",
        );
    }
}

//! The demo, as a newcomer runs it.

use crate::harness::{run, text};

#[test]
fn the_demo_says_the_verse_and_leaves_nothing_running() {
    let output = run(&["demo"]);
    let (said, notes) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}{notes}");
    assert_eq!(
        said.trim(),
        "For God so loved the world, that he gave his only begotten Son, that whosoever believeth in him should not perish, but have everlasting life."
    );
    assert!(notes.contains("word for word") && notes.contains("tokens per second"), "{notes}");
}

//! macOS's version, the chip and what each chip's memory can do.

/// A version of macOS: major and minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::commands::doctor) struct MacosVersion(pub u32, pub u32);

/// The oldest macOS whose librdma has what JACCL calls: the published wheel for macOS 26 was built
/// for this one, and loads on 26.0 and 26.1 without it.
pub(in crate::commands::doctor) const JACCL_MACOS: MacosVersion = MacosVersion(26, 2);

impl MacosVersion {
    /// What `sw_vers -productVersion` prints.
    pub(in crate::commands::doctor) fn parse(output: &str) -> Option<Self> {
        let mut parts = output.trim().split('.').map(str::parse::<u32>);
        let major = parts.next()?.ok()?;
        Some(Self(major, parts.next().map_or(Some(0), Result::ok)?))
    }
}

/// Memory bandwidth in GB/s that Apple states for a chip, as `machdep.cpu.brand_string` names it.
/// Where a chip comes with fewer GPU cores and a narrower memory, the lower figure.
pub(in crate::commands::doctor) fn memory_bandwidth(chip: &str) -> Option<u32> {
    const CHIPS: [(&str, u32); 16] = [
        ("Apple M1", 68),
        ("Apple M1 Pro", 200),
        ("Apple M1 Max", 400),
        ("Apple M1 Ultra", 800),
        ("Apple M2", 100),
        ("Apple M2 Pro", 200),
        ("Apple M2 Max", 400),
        ("Apple M2 Ultra", 800),
        ("Apple M3", 100),
        ("Apple M3 Pro", 150),
        ("Apple M3 Max", 300),
        ("Apple M3 Ultra", 819),
        ("Apple M4", 120),
        ("Apple M4 Pro", 273),
        ("Apple M4 Max", 410),
        ("Apple M5", 153),
    ];
    CHIPS.iter().find(|(name, _)| *name == chip.trim()).map(|(_, bandwidth)| *bandwidth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_26_2_are_below_what_jaccl_needs() {
        for (text, is_enough) in
            [("26.0\n", false), ("26.1.1", false), ("26.2", true), ("26.5.1\n", true), ("27", true)]
        {
            assert_eq!(MacosVersion::parse(text).unwrap() >= JACCL_MACOS, is_enough, "{text}");
        }
        assert_eq!(MacosVersion::parse("15.7.2"), Some(MacosVersion(15, 7)));
        assert_eq!(MacosVersion::parse(""), None);
    }

    #[test]
    fn a_chip_is_found_by_its_whole_name() {
        assert_eq!(memory_bandwidth("Apple M4 Max\n"), Some(410));
        assert_eq!(memory_bandwidth("Apple M4"), Some(120));
        assert_eq!(memory_bandwidth("Apple M9"), None);
    }
}

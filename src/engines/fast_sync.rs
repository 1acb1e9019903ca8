//! Whether MLX hands over between GPU and processor by shared events or by fast synchronisation
//! (`MLX_METAL_FAST_SYNCH`, which MLX reads once per process), and the file in which a self-test
//! keeps what was better on this machine. How that is measured is not known here.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use shardpack_mlx::runtime::MLX_VERSION;

use crate::args::{EngineChoice, EngineName, FastSyncName};

/// The variable that MLX reads: 1 is fast synchronisation, 0 shared events.
pub(crate) const VARIABLE: &str = "MLX_METAL_FAST_SYNCH";

/// Name of the file in the folder of engines.
const FILE: &str = "fast-sync.json";

/// Largest such file; it has ten short fields.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The number of the file's format.
const FORMAT: u32 = 1;

/// What a self-test's figures are true of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Version of MLX.
    pub mlx: String,
    /// macOS's build, such as `25F80`.
    pub macos_build: String,
    /// The chip, such as `Apple M3 Ultra`.
    pub chip: String,
}

impl Machine {
    /// This one; none where there is no Metal.
    pub(crate) fn this() -> Option<Self> {
        if !cfg!(target_os = "macos") {
            return None;
        }
        let macos_build = output("sw_vers", &["-buildVersion"])?;
        let chip = output("sysctl", &["-n", "machdep.cpu.brand_string"])?;
        Some(Self { mlx: MLX_VERSION.to_owned(), macos_build, chip })
    }
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

/// What a self-test chose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Measured {
    /// The format's number.
    pub format: u32,
    /// Whether fast synchronisation is to be used.
    pub fast_sync: bool,
    /// Why.
    pub reason: String,
    /// Median microseconds of an all-reduce in a GPU's graph, with events.
    pub events_us: f64,
    /// The same with fast synchronisation; none if it did not end.
    pub fast_us: Option<f64>,
    /// All-reduces of the soak that were right, all of them or none.
    pub soaked: u64,
    /// Where it was measured.
    pub machine: Machine,
}

impl Measured {
    /// Chooses: fast synchronisation if the soak was right and it is faster by more than a tenth.
    pub(crate) fn choose(
        events_us: f64,
        fast: Result<(f64, u64), String>,
        machine: Machine,
    ) -> Self {
        let (fast_sync, reason, fast_us, soaked) = match fast {
            Err(problem) => (false, format!("fast synchronisation failed: {problem}"), None, 0),
            Ok((us, soaked)) => {
                let fast_sync = us < 0.9 * events_us;
                let reason = format!(
                    "the self-test measured {us:.0} µs per all-reduce with it and {events_us:.0} µs \
                     with events"
                );
                (fast_sync, reason, Some(us), soaked)
            }
        };
        Self { format: FORMAT, fast_sync, reason, events_us, fast_us, soaked, machine }
    }

    /// Writes the file.
    pub(crate) fn store(&self, engines: &Path) -> anyhow::Result<PathBuf> {
        let path = engines.join(FILE);
        let shown = || path.display().to_string();
        fs::create_dir_all(engines).with_context(shown)?;
        let mut file = tempfile::NamedTempFile::new_in(engines).with_context(shown)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.as_file().sync_all().with_context(shown)?;
        file.persist(&path).with_context(shown)?;
        Ok(path)
    }

    /// What the file says of `machine`; an error says why it says nothing.
    fn read(engines: &Path, machine: &Machine) -> Result<Self, String> {
        let path = engines.join(FILE);
        let size = fs::metadata(&path).map(|it| it.len());
        let Ok(size) = size else {
            return Err(
                "no self-test has measured it here: shardpack doctor --self-test".to_owned()
            );
        };
        let again = "run shardpack doctor --self-test again";
        let bytes = (size <= MAX_FILE_BYTES).then(|| fs::read(&path).ok()).flatten();
        let found = bytes.and_then(|bytes| serde_json::from_slice::<Self>(&bytes).ok());
        let found = found
            .filter(|found| found.format == FORMAT)
            .ok_or_else(|| format!("{} is not what a self-test writes: {again}", path.display()))?;
        let (then, now) = (&found.machine, machine);
        let changed = [
            ("MLX", &then.mlx, &now.mlx),
            ("macOS", &then.macos_build, &now.macos_build),
            ("the chip", &then.chip, &now.chip),
        ];
        if let Some((what, then, now)) = changed.into_iter().find(|(_, then, now)| then != now) {
            return Err(format!("{what} was {then} at the self-test and is {now}: {again}"));
        }
        Ok(found)
    }
}

/// What is used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub fast_sync: bool,
    pub reason: String,
}

/// What a choice means on `machine`, none of which is one without Metal.
pub(crate) fn decide(name: FastSyncName, engines: &Path, machine: Option<&Machine>) -> Decision {
    let decision = |fast_sync, reason: &str| Decision { fast_sync, reason: reason.to_owned() };
    let Some(machine) = machine else {
        return decision(false, "no effect: there is no Metal on this system");
    };
    match name {
        FastSyncName::On => decision(true, "as --fast-sync says"),
        FastSyncName::Off => decision(false, "as --fast-sync says"),
        FastSyncName::Auto => match Measured::read(engines, machine) {
            Ok(found) => decision(found.fast_sync, &found.reason),
            Err(reason) => decision(false, &reason),
        },
    }
}

impl EngineChoice {
    /// What this choice means on this machine.
    pub(crate) fn fast_sync(&self) -> anyhow::Result<Decision> {
        Ok(decide(self.fast_sync, &super::folder(None)?, Machine::this().as_ref()))
    }

    /// The variable of a process that will load MLX; none with another engine.
    pub(crate) fn fast_sync_variable(
        &self,
    ) -> anyhow::Result<Option<(&'static str, &'static str)>> {
        if self.engine != EngineName::Mlx {
            return Ok(None);
        }
        let value = if self.fast_sync()?.fast_sync { "1" } else { "0" };
        Ok(Some((VARIABLE, value)))
    }

    /// The line that says it; none where nobody chose and nothing can be chosen.
    pub(super) fn fast_sync_line(&self) -> anyhow::Result<Option<String>> {
        if !cfg!(target_os = "macos") && self.fast_sync == FastSyncName::Auto {
            return Ok(None);
        }
        let Decision { fast_sync, reason } = self.fast_sync()?;
        Ok(Some(if fast_sync {
            format!("fast sync: on ({reason})")
        } else {
            format!("fast sync: off ({reason})")
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let [mlx, macos_build, chip] = ["0.32.2", "25F80", "Apple M3 Ultra"].map(str::to_owned);
        Machine { mlx, macos_build, chip }
    }

    fn auto(engines: &Path, machine: &Machine) -> Decision {
        decide(FastSyncName::Auto, engines, Some(machine))
    }

    #[test]
    fn auto_is_off_until_a_self_test_has_found_better() {
        let folder = tempfile::tempdir().unwrap();
        let engines = folder.path();
        let before = auto(engines, &machine());
        assert!(!before.fast_sync && before.reason.contains("doctor --self-test"), "{before:?}");
        Measured::choose(160.0, Ok((18.0, 9000)), machine()).store(engines).unwrap();
        let after = auto(engines, &machine());
        assert!(after.fast_sync && after.reason.contains("18 µs"), "{after:?}");
        // A later self-test that fails takes it back.
        let failed = Err("a sum was wrong".to_owned());
        Measured::choose(160.0, failed, machine()).store(engines).unwrap();
        let after = auto(engines, &machine());
        assert!(!after.fast_sync && after.reason.contains("a sum was wrong"), "{after:?}");
        Measured::choose(20.0, Ok((19.0, 9000)), machine()).store(engines).unwrap();
        assert!(!auto(engines, &machine()).fast_sync, "no gain, no risk");
    }

    #[test]
    fn what_was_measured_elsewhere_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        Measured::choose(160.0, Ok((18.0, 9000)), machine()).store(folder.path()).unwrap();
        let check = |change: &dyn Fn(&mut Machine), expected: &str| {
            let mut other = machine();
            change(&mut other);
            let found = auto(folder.path(), &other);
            assert!(!found.fast_sync && found.reason.contains(expected), "{found:?}");
        };
        check(&|it| it.mlx = "0.33.0".to_owned(), "MLX was 0.32.2");
        check(&|it| it.macos_build = "25G1".to_owned(), "macOS was 25F80");
        check(&|it| it.chip = "Apple M4".to_owned(), "the chip was Apple M3 Ultra");
        fs::write(folder.path().join(FILE), "{\"format\": 2}").unwrap();
        check(&|_| (), "is not what a self-test writes");
    }

    #[test]
    fn a_choice_of_the_user_stands_where_there_is_metal() {
        let (folder, machine) = (Path::new("/does/not/exist"), machine());
        assert!(decide(FastSyncName::On, folder, Some(&machine)).fast_sync);
        assert!(!decide(FastSyncName::Off, folder, Some(&machine)).fast_sync);
        let without = decide(FastSyncName::On, folder, None);
        assert!(!without.fast_sync && without.reason.contains("no Metal"), "{without:?}");
    }
}

# Homebrew's formula for shardpack. dist/build.sh fills in the version, the address and the SHA-256
# of each archive; the result belongs into the folder Formula of a tap.
class Shardpack < Formula
  desc "Quantize, shard, push and serve large language models over a few machines"
  homepage "https://github.com/REPOSITORY"
  version "@VERSION@"
  license "Apache-2.0"

  on_macos do
    depends_on arch: :arm64
    depends_on macos: :sonoma
    url "@RELEASES@/shardpack-@VERSION@-aarch64-apple-darwin.tar.gz"
    sha256 "@SHA256 aarch64-apple-darwin@"
  end

  on_linux do
    on_arm do
      url "@RELEASES@/shardpack-@VERSION@-aarch64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256 aarch64-unknown-linux-musl@"
    end
    on_intel do
      url "@RELEASES@/shardpack-@VERSION@-x86_64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256 x86_64-unknown-linux-musl@"
    end
  end

  def install
    bin.install "shardpack"
    generate_completions_from_executable(bin/"shardpack", "completions")
    system bin/"shardpack", "man", man1
    pkgshare.install Dir["*.plist", "*.service"]
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/shardpack --version")
    system bin/"shardpack", "demo"
  end
end

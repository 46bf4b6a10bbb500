// Command images builds Watershed's images, an image FROM scratch for each binary, as OCI layouts in tar files.
// containerd and docker can load the files. With -release it builds all artefacts of a release. The command needs no
// daemon, and builds are reproducible: the same commit gives the same bytes.
package main

import (
	"crypto/ed25519"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// packages maps the name of each image to its main package.
var packages = map[string]string{
	"gateway":     "./services/gateway/cmd/gateway",
	"authn":       "./services/authn/cmd/authn",
	"authz":       "./services/authz/cmd/authz",
	"admission":   "./services/admission/cmd/admission",
	"registry":    "./services/registry/cmd/registry",
	"watchfanout": "./services/watchfanout/cmd/watchfanout",
	"etcd":        "./cmd/embedded/cmd/etcd",
	"nats":        "./cmd/embedded/cmd/nats",
	"xds":         "./cmd/xds/cmd/xds",
	"certgen":     "./cmd/certgen/cmd/certgen",
	"watershed":   "./cmd/watershed",
}

// user is an unprivileged user id without an entry in /etc/passwd, so that no image runs as root.
const user = "65532:65532"

type options struct {
	out, registry, tag, ldflags, load string
	only                              []string
	platforms                         []v1.Platform
	version, revision                 string
	created                           time.Time

	// The options of a release. Without a key, its checksums are not signed.
	release, push, unsigned bool
	key                     ed25519.PrivateKey
}

func main() {
	o, err := parse(os.Args[1:])
	if err == nil && o.release {
		err = o.runRelease()
	} else if err == nil {
		err = o.runImages()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.StringVar(&o.out, "out", ".build/images", "The directory of the files. With -release it must not exist.")
	fs.StringVar(&o.registry, "registry", "watershed.dev", "The prefix of the image names.")
	fs.StringVar(&o.tag, "tag", "dev", "The tag of the images. With -release it is the version.")
	fs.StringVar(&o.ldflags, "ldflags", "", "Linker flags in addition to -s -w.")
	fs.StringVar(&o.load, "load", "",
		`Load the images into "docker" or "containerd" (ctr, namespace k8s.io). Empty: do not load.`)
	only := fs.String("only", "", "Images to build, comma separated. Empty: all.")
	platforms := fs.String("platforms", "", "Platforms of the images, such as linux/amd64,linux/arm64. Empty: the host's.")
	release := fs.String("release", "", "Build all artefacts of the release with this version, such as v0.1.0.")
	key := fs.String("key", "", "PEM file with the ed25519 key that signs the release. Empty: it is not signed.")
	fs.BoolVar(&o.push, "push", false, "Push the images and the chart of the release to -registry.")
	fs.BoolVar(&o.unsigned, "unsigned", false, "Allow -push without -key.")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if err := o.parsePlatforms(*platforms); err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(*only, ",") {
		if name == "" {
			continue
		}
		if packages[name] == "" {
			return nil, fmt.Errorf("-only %q: unknown image", name)
		}
		o.only = append(o.only, name)
	}
	if len(o.only) == 0 {
		for name := range packages {
			o.only = append(o.only, name)
		}
	}
	slices.Sort(o.only)
	if o.load != "" && o.load != "docker" && o.load != "containerd" {
		return nil, fmt.Errorf("-load %q: want docker or containerd", o.load)
	}
	o.version, o.revision = git("describe", "--tags", "--always", "--dirty"), git("rev-parse", "HEAD")
	seconds, _ := strconv.ParseInt(git("log", "-1", "--format=%ct"), 10, 64)
	o.created = time.Unix(seconds, 0).UTC() // the time of the commit, so that builds are reproducible
	if *release != "" && *only != "" {
		return nil, fmt.Errorf("-only %q with -release: a release has all images: omit -only", *only)
	}
	if *release != "" {
		return o, o.parseRelease(*release, *key)
	}
	if o.push || *key != "" {
		return nil, fmt.Errorf("-push %t, -key %q: both need -release VERSION", o.push, *key)
	}
	return o, nil
}

// parsePlatforms parses a list of platforms. An empty list is the platform of the go command.
func (o *options) parsePlatforms(list string) error {
	if list == "" {
		list = goEnv("GOOS") + "/" + goEnv("GOARCH")
	}
	for text := range strings.SplitSeq(list, ",") {
		p, err := v1.ParsePlatform(text)
		if err != nil || p.OS == "" || p.Architecture == "" || p.Variant != "" {
			return fmt.Errorf("-platforms %q: want OS/ARCHITECTURE, such as linux/amd64", text)
		}
		o.platforms = append(o.platforms, *p)
	}
	return nil
}

// git returns the output of git, or nothing outside of a repository.
func git(args ...string) string {
	out, err := exec.Command("git", args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// runImages builds the images.
func (o *options) runImages() error {
	work, err := os.MkdirTemp("", "images")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	_, err = o.images(work)
	return err
}

// images builds the images, and writes them to -out. Their binaries and layouts are in the directory work.
func (o *options) images(work string) (built []*image, err error) {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return nil, err
	}
	for _, name := range o.only {
		i, err := o.image(name, work)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		built = append(built, i)
	}
	return built, nil
}

// loadInto loads the file into a daemon.
func (o *options) loadInto(file string) error {
	var cmd *exec.Cmd
	switch o.load {
	case "docker":
		cmd = exec.Command("docker", "load", "--input", file)
	case "containerd":
		cmd = exec.Command("ctr", "--namespace", "k8s.io", "images", "import", file)
	default:
		return nil
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

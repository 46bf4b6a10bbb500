// Command images builds Watershed's images, an image FROM scratch for each binary, as OCI layouts in tar files.
// containerd and docker can load the files. The command needs no daemon, and builds are reproducible: the same commit
// gives the same bytes.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
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
	release, revision                 string
	created                           time.Time
}

func main() {
	o, err := parse(os.Args[1:])
	if err == nil {
		err = o.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.StringVar(&o.out, "out", ".build/images", "The directory of the tar files.")
	fs.StringVar(&o.registry, "registry", "watershed.dev", "The prefix of the image names.")
	fs.StringVar(&o.tag, "tag", "dev", "The tag of the images.")
	fs.StringVar(&o.ldflags, "ldflags", "", "Linker flags in addition to -s -w.")
	fs.StringVar(&o.load, "load", "",
		`Load the images into "docker" or "containerd" (ctr, namespace k8s.io). Empty: do not load.`)
	only := fs.String("only", "", "Images to build, comma separated. Empty: all.")
	if err := fs.Parse(args); err != nil {
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
	o.release, o.revision = git("describe", "--tags", "--always", "--dirty"), git("rev-parse", "HEAD")
	seconds, _ := strconv.ParseInt(git("log", "-1", "--format=%ct"), 10, 64)
	o.created = time.Unix(seconds, 0).UTC() // the time of the commit, so that builds are reproducible
	return o, nil
}

// git returns the output of git, or nothing outside of a repository.
func git(args ...string) string {
	out, err := exec.Command("git", args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func (o *options) run() error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "images")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	for _, name := range o.only {
		if err := o.image(name, work); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
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

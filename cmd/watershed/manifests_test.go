package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"watershed.dev/cmd/certgen"
	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/watershed/check"
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
)

// object is the part of an object that describes a Service or a container.
type object struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		// Selector is the selector of a Service. Other kinds have another type of selector.
		Selector map[string]any
		Template podTemplate
	}
}

type podTemplate struct {
	Metadata struct{ Labels map[string]string }
	Spec     struct {
		TerminationGracePeriodSeconds int
		Containers                    []struct {
			Image     string
			Args      []string
			Env       []struct{ Name, Value string }
			Lifecycle struct {
				PreStop struct {
					Sleep struct{ Seconds int }
				}
			}
		}
	}
}

// rendered returns the objects of an overlay.
func rendered(t *testing.T, path string) (all []object) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var o object
		if err := yaml.Unmarshal(doc, &o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}

// deployed are the workloads of an overlay.
type deployed struct {
	*testing.T
	// grace is the time that a container has to stop after its preStop hook.
	grace time.Duration
	// exposed maps a service to the name of the pods that serve its RPCs to other pods.
	exposed map[string]string
	// published maps a service to the Service whose endpoints xds publishes, and selected a Service to its pods' name.
	published, selected map[string]string
}

// load loads the settings of a container as its program does.
func (d *deployed) load(pod, image string, args []string) {
	d.Helper()
	fs := pflag.NewFlagSet(image, pflag.ContinueOnError)
	switch image {
	case "etcd":
		(&embedded.Etcd{}).AddFlags(fs)
	case "nats":
		(&embedded.NATS{}).AddFlags(fs)
	case "certgen":
		(&certgen.Config{}).AddFlags(fs)
	case "xds":
		c := &xds.Config{}
		c.AddFlags(fs)
		defer func() {
			for service, target := range c.Slices {
				d.published[service] = strings.TrimSuffix(target, ":rpc")
			}
		}()
	default:
		d.loadServices(pod, image, args)
		return
	}
	if err := config.Load(fs, args); err != nil {
		d.Errorf("%s: %v", pod, err)
	}
}

// loadServices loads the settings of a service's image, or of the image of cmd/watershed.
func (d *deployed) loadServices(pod, image string, args []string) {
	d.Helper()
	targets := []string{image}
	if image == "watershed" {
		if args[0] != "run" {
			d.Fatalf("%s runs watershed %s", pod, args[0])
		}
		args = args[1:]
		var err error
		if targets, err = targetsOf(args); err != nil {
			d.Fatalf("%s: %v", pod, err)
		}
	}
	p, err := process.Load(modules, targets, image, args)
	if err != nil {
		d.Errorf("%s: %v", pod, err)
		return
	}
	// The rest of StopTimeout is for runners that do not stop.
	if stop := p.StopTimeout() - lifecycle.StopTimeout; d.grace < stop {
		d.Errorf("%s has %v to stop, and may need %v", pod, d.grace, stop)
	}
	for _, service := range p.Exposed() {
		d.exposed[service] = pod
	}
}

// The programs accept the settings of every container, and stop within its grace period. xds publishes exactly the
// services that other pods call, from Services that select the pods.
func TestManifestsMatchTheProcesses(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "deploy", "k8s", "rendered", "*.yaml"))
	if err != nil || len(files) != 3 {
		t.Fatalf("%v: %v", files, err)
	}
	for _, file := range files {
		d := &deployed{
			T: t, exposed: map[string]string{}, published: map[string]string{}, selected: map[string]string{},
		}
		for _, o := range rendered(t, file) {
			const name = "app.kubernetes.io/name"
			if o.Kind == "Service" {
				d.selected[o.Metadata.Name], _ = o.Spec.Selector[name].(string)
			}
			for _, c := range o.Spec.Template.Spec.Containers {
				repository, _, _ := strings.Cut(c.Image, ":")
				image, ours := strings.CutPrefix(repository, "watershed.dev/")
				if !ours {
					continue
				}
				t.Run(filepath.Base(file)+"/"+o.Metadata.Name, func(t *testing.T) {
					for _, e := range c.Env {
						t.Setenv(e.Name, e.Value)
					}
					own := *d
					own.T = t
					own.grace = time.Duration(o.Spec.Template.Spec.TerminationGracePeriodSeconds-
						c.Lifecycle.PreStop.Sleep.Seconds) * time.Second
					own.load(o.Spec.Template.Metadata.Labels[name], image, c.Args)
				})
			}
		}
		for service, pod := range d.exposed {
			if of := d.published[service]; d.selected[of] != pod {
				t.Errorf("%s: %s is in %s, and xds publishes Service %q of %q", file, service, pod, of, d.selected[of])
			}
		}
		if len(d.published) != len(d.exposed) {
			t.Errorf("%s: xds publishes %v, and other pods call %v", file, slices.Sorted(maps.Keys(d.published)),
				slices.Sorted(maps.Keys(d.exposed)))
		}
	}
}

// `watershed check --pre` knows the permissions that the overlays need, the names of their objects, and the chart's
// least version of Kubernetes.
func TestCheckBeforeAnInstallationKnowsTheManifests(t *testing.T) {
	for _, overlay := range []string{"dev", "ha", "compact"} {
		text, err := os.ReadFile(filepath.Join("../../deploy/k8s/rendered", overlay+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range bytes.Split(text, []byte("\n---\n")) {
			var o struct {
				APIVersion, Kind string
				Metadata         struct{ Name string }
				Rules            []struct{ APIGroups, Resources, Verbs []string }
			}
			if err := yaml.Unmarshal(doc, &o); err != nil {
				t.Fatal(err)
			}
			need := func(verb, group, resource string) {
				if !slices.Contains(check.Needed, check.Permission{Verb: verb, Group: group, Resource: resource}) {
					t.Errorf("%s/%s needs %s %s.%s", o.Kind, o.Metadata.Name, verb, resource, group)
				}
			}
			kind := schema.FromAPIVersionAndKind(o.APIVersion, o.Kind)
			resource, _ := meta.UnsafeGuessKindToResource(kind)
			need("create", kind.Group, resource.Resource)
			for _, r := range o.Rules {
				for _, verb := range r.Verbs {
					need(verb, r.APIGroups[0], r.Resources[0])
				}
			}
			names := check.ObjectNames
			switch o.Kind {
			case "PriorityClass":
				names = check.PriorityClassNames
			case "Deployment", "StatefulSet", "Service":
			default:
				continue
			}
			if !slices.Contains(names, o.Metadata.Name) {
				t.Errorf("%s/%s is not known", o.Kind, o.Metadata.Name)
			}
		}
	}
	chart, err := os.ReadFile("../../deploy/k8s/chart/Chart.yaml")
	want := `kubeVersion: ">=` + check.MinimalKubernetes + `-0"`
	if err != nil || !strings.Contains(string(chart), want) {
		t.Errorf("%v: the chart has no %s", err, want)
	}
}

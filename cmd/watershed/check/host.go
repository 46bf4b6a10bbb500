package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/process"
)

// Host is the state of a hosting cluster before the manifests or the chart are applied.
type Host struct {
	Server string
	// Error is why the cluster does not respond. The fields below are then empty.
	Error   error
	Version string
	// SkewSeconds is how far the clock of the API server is ahead of this machine's clock. NodesAhead are the nodes
	// whose leases have a time after the API server's clock, and NodesError is why the leases cannot be read.
	SkewSeconds float64
	NodesAhead  []NodeAhead
	NodesError  error
	// Missing are the permissions that the user lacks, such as "create deployments.apps". AccessError is why they
	// cannot be read.
	Missing     []string
	AccessError error
	// Existing are the objects of the namespace with ObjectNames, as Kind/name. PriorityClasses are the objects of the
	// cluster with PriorityClassNames. Exists reports if the namespace exists, and Terminating if it is being deleted.
	Namespace                 string
	Exists, Terminating       bool
	Existing, PriorityClasses []string
	ObjectsError              error
	// StorageClasses are the names of all StorageClasses. HasDefault reports if there is a default. StorageClass is
	// the selected class; empty: the default.
	StorageClass   string
	StorageClasses []string
	HasDefault     bool
	StorageError   error
}

// NodeAhead is a node whose clock is ahead of the API server's clock, by at least Seconds.
type NodeAhead struct {
	Name    string
	Seconds float64
}

// Permission is a permission that an installation needs in its namespace, or in the cluster.
type Permission struct{ Verb, Group, Resource string }

// Needed are the permissions for the objects of the overlays and the chart. A user may create a Role only with the
// permissions that the user has.
var Needed = []Permission{
	{"create", "", "namespaces"},
	{"create", "scheduling.k8s.io", "priorityclasses"},
	{"create", "", "serviceaccounts"},
	{"create", "", "services"},
	{"create", "", "configmaps"},
	{"create", "", "secrets"},
	{"get", "", "secrets"},
	{"update", "", "secrets"},
	{"create", "apps", "deployments"},
	{"create", "apps", "statefulsets"},
	{"create", "batch", "jobs"},
	{"create", "batch", "cronjobs"},
	{"create", "policy", "poddisruptionbudgets"},
	{"create", "networking.k8s.io", "networkpolicies"},
	{"create", "rbac.authorization.k8s.io", "roles"},
	{"create", "rbac.authorization.k8s.io", "rolebindings"},
	{"get", "discovery.k8s.io", "endpointslices"},
	{"list", "discovery.k8s.io", "endpointslices"},
	{"watch", "discovery.k8s.io", "endpointslices"},
}

// inCluster are the resources without a namespace.
var inCluster = []string{"namespaces", "priorityclasses"}

// ObjectNames are the names of the Deployments, StatefulSets and Services of the overlays.
var ObjectNames = []string{"admission", "authn", "authz", "etcd", "front", "gateway", "gateway-internal", "jaeger",
	"nats", "registry", "watchfanout", "xds"}

// PriorityClassNames are the names of the PriorityClasses of the overlays.
var PriorityClassNames = []string{"watershed", "watershed-storage"}

// readHost reads the state of a hosting cluster. An error means that the configuration is invalid.
func (o *Options) readHost(ctx context.Context, config *rest.Config) (*Host, error) {
	config.QPS = -1 // some 60 requests
	h := &Host{Server: config.Host, Namespace: o.Namespace, StorageClass: o.StorageClass}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	if h.Error = h.readVersion(ctx, client, httpClient); h.Error != nil {
		return h, nil
	}
	var wg sync.WaitGroup
	wg.Go(func() { h.NodesError = h.readNodes(ctx, client) })
	wg.Go(func() { h.AccessError = h.readPermissions(ctx, client) })
	wg.Go(func() { h.ObjectsError = h.readObjects(ctx, client) })
	wg.Go(func() { h.StorageError = h.readStorage(ctx, client) })
	wg.Wait()
	return h, nil
}

// readVersion reads the version and the clock of the API server.
func (h *Host) readVersion(ctx context.Context, client kubernetes.Interface, httpClient *http.Client) error {
	u := client.Discovery().RESTClient().Get().AbsPath("/version").URL()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	sent := time.Now()
	resp, err := httpClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		server := process.Report{Time: date}
		server.CompareClock(sent, time.Now())
		h.SkewSeconds = server.SkewSeconds
	}
	body := io.LimitReader(resp.Body, 64<<10)
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(body, 300))
		return fmt.Errorf("%s: %s: %s", u.Path, resp.Status, text)
	}
	var v version.Info
	err = json.NewDecoder(body).Decode(&v)
	h.Version = v.GitVersion
	return err
}

// readNodes reads the leases of the nodes.
func (h *Host) readNodes(ctx context.Context, client kubernetes.Interface) error {
	leases, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	now := time.Now().Add(time.Duration((h.SkewSeconds + serverSkew) * float64(time.Second)))
	for _, l := range leases.Items {
		if at := l.Spec.RenewTime; at != nil && at.After(now) {
			h.NodesAhead = append(h.NodesAhead, NodeAhead{l.Name, at.Sub(now).Seconds()})
		}
	}
	return nil
}

// readPermissions asks the API server for each of Needed.
func (h *Host) readPermissions(ctx context.Context, client kubernetes.Interface) error {
	for _, p := range Needed {
		namespace := h.Namespace
		if slices.Contains(inCluster, p.Resource) {
			namespace = ""
		}
		review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx,
			&authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Namespace: namespace, Verb: p.Verb, Group: p.Group, Resource: p.Resource},
			}}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if !review.Status.Allowed {
			name := p.Resource
			if p.Group != "" {
				name += "." + p.Group
			}
			h.Missing = append(h.Missing, p.Verb+" "+name)
		}
	}
	return nil
}

// readObjects reads the namespace, and the objects with the names of the overlays.
func (h *Host) readObjects(ctx context.Context, client kubernetes.Interface) error {
	exists := func(kind string, names []string, get func(name string) error) (found []string, err error) {
		for _, name := range names {
			switch err := get(name); {
			case err == nil:
				found = append(found, kind+"/"+name)
			case !apierrors.IsNotFound(err):
				return found, err
			}
		}
		return found, nil
	}
	var err error
	h.PriorityClasses, err = exists("PriorityClass", PriorityClassNames, func(name string) error {
		_, err := client.SchedulingV1().PriorityClasses().Get(ctx, name, metav1.GetOptions{})
		return err
	})
	if apierrors.IsForbidden(err) { // the user is an administrator of the namespace only
		err = nil
	}
	ns, nsErr := client.CoreV1().Namespaces().Get(ctx, h.Namespace, metav1.GetOptions{})
	if nsErr != nil {
		if apierrors.IsNotFound(nsErr) {
			nsErr = nil
		}
		return errors.Join(err, nsErr)
	}
	h.Exists, h.Terminating = true, ns.DeletionTimestamp != nil
	for kind, get := range map[string]func(name string) error{
		"Deployment": func(name string) error {
			_, err := client.AppsV1().Deployments(h.Namespace).Get(ctx, name, metav1.GetOptions{})
			return err
		},
		"StatefulSet": func(name string) error {
			_, err := client.AppsV1().StatefulSets(h.Namespace).Get(ctx, name, metav1.GetOptions{})
			return err
		},
		"Service": func(name string) error {
			_, err := client.CoreV1().Services(h.Namespace).Get(ctx, name, metav1.GetOptions{})
			return err
		},
	} {
		found, readErr := exists(kind, ObjectNames, get)
		err = errors.Join(err, readErr)
		h.Existing = append(h.Existing, found...)
	}
	slices.Sort(h.Existing)
	return err
}

// defaultClass is the annotation of the default StorageClass.
const defaultClass = "storageclass.kubernetes.io/is-default-class"

// readStorage reads the names of the StorageClasses.
func (h *Host) readStorage(ctx context.Context, client kubernetes.Interface) error {
	classes, err := client.StorageV1().StorageClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, c := range classes.Items {
		h.StorageClasses = append(h.StorageClasses, c.Name)
		h.HasDefault = h.HasDefault || c.Annotations[defaultClass] == "true"
	}
	return nil
}

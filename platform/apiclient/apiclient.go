// Package apiclient is the client with which services read the cluster: an ordinary client of the gateway, whose
// informers have a known age. It does not access etcd or the event log directly.
//
// Cluster.Run owns the goroutines of the informers, and measures their age on its caller's goroutine.
package apiclient

import (
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/version"
)

// resync is the resync period of informers, as in kube-apiserver.
const resync = 10 * time.Minute

// Config reads the kubeconfig of the named service. The client does not limit its requests, because the gateway does.
func Config(kubeconfig, service string) (*rest.Config, error) {
	if kubeconfig == "" {
		return nil, errors.New("--kubeconfig is required: " + service + " reads the cluster through the gateway")
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
	}
	// The part before the slash is the manager in managedFields of the services' writes. It is kube-apiserver's.
	c.UserAgent = fmt.Sprintf("kube-apiserver/%s watershed-%s/%s", kubeversion.Info().GitVersion, service,
		version.Release())
	c.QPS = -1
	return c, nil
}

// Protobuf returns a copy of c for typed clients.
func Protobuf(c *rest.Config) *rest.Config {
	p := rest.CopyConfig(c)
	p.ContentType = "application/vnd.kubernetes.protobuf"
	return p
}

// Informers returns informers that drop managedFields, as kube-apiserver's own informers do. The services do not read
// managedFields, which are a large part of an object. strip removes further fields that a service does not read.
func Informers(client kubernetes.Interface, strip ...func(obj any)) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, resync,
		informers.WithTransform(func(obj any) (any, error) {
			if m, err := meta.Accessor(obj); err == nil && m.GetManagedFields() != nil {
				m.SetManagedFields(nil)
			}
			for _, s := range strip {
				s(obj)
			}
			return obj, nil
		}))
}

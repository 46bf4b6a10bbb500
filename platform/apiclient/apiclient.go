// Package apiclient is how a service that reads the cluster does so: as an ordinary client of the gateway.
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

// resync is how often informers hand everything to their handlers again, kube-apiserver's.
const resync = 10 * time.Minute

// Config reads a kubeconfig for the service with the name. Requests are not limited by the client: the gateway limits.
func Config(kubeconfig, service string) (*rest.Config, error) {
	if kubeconfig == "" {
		return nil, errors.New("--kubeconfig is required: " + service + " reads the cluster through the gateway")
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
	}
	// What they write says so in its managedFields as what kube-apiserver writes does, by the part before the slash.
	c.UserAgent = fmt.Sprintf("kube-apiserver/%s watershed-%s/%s", kubeversion.Info().GitVersion, service,
		version.Release())
	c.QPS = -1
	return c, nil
}

// Protobuf is c for typed clients.
func Protobuf(c *rest.Config) *rest.Config {
	p := rest.CopyConfig(c)
	p.ContentType = "application/vnd.kubernetes.protobuf"
	return p
}

// Informers keep objects without their managedFields, as kube-apiserver's own do: nobody here reads them, and they are
// a good part of an object. strip takes more off them, for who reads little.
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

package check

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"watershed.dev/services/admission"
)

// Cluster are the objects of the cluster whose servers requests depend on.
type Cluster struct {
	Webhooks    []Webhook
	APIServices []APIService
}

// Webhook is an admission webhook.
type Webhook struct {
	// Name is the kind and name of the configuration, and the name of the webhook.
	Name string
	// Required is true if the failurePolicy is Fail.
	Required bool
	// Endpoint is host:port and path, as admission reports it.
	Endpoint string
	// Problem is why the webhook cannot respond, or nothing.
	Problem string
}

// APIService is a group version that another server serves.
type APIService struct{ Name, Problem string }

// ReadCluster reads the webhooks and APIServices.
func ReadCluster(ctx context.Context, client kubernetes.Interface) (c Cluster, err error) {
	hooks := client.AdmissionregistrationV1()
	mutating, err := hooks.MutatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err != nil {
		return c, err
	}
	validating, err := hooks.ValidatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err != nil {
		return c, err
	}
	add := func(name string, config admissionregistrationv1.WebhookClientConfig,
		policy *admissionregistrationv1.FailurePolicyType) {
		c.Webhooks = append(c.Webhooks, Webhook{
			Name:     name,
			Required: policy == nil || *policy == admissionregistrationv1.Fail,
			Endpoint: admission.ConfiguredEndpoint(config),
			Problem:  problem(ctx, client, config),
		})
	}
	for _, m := range mutating.Items {
		for _, w := range m.Webhooks {
			add("MutatingWebhookConfiguration "+m.Name+", webhook "+w.Name, w.ClientConfig, w.FailurePolicy)
		}
	}
	for _, v := range validating.Items {
		for _, w := range v.Webhooks {
			add("ValidatingWebhookConfiguration "+v.Name+", webhook "+w.Name, w.ClientConfig, w.FailurePolicy)
		}
	}
	c.APIServices, err = readAPIServices(ctx, client)
	return c, err
}

// problem returns why a webhook cannot respond: its CA is invalid, or its Service has no ready endpoint.
func problem(ctx context.Context, client kubernetes.Interface, c admissionregistrationv1.WebhookClientConfig) string {
	if len(c.CABundle) > 0 && !x509.NewCertPool().AppendCertsFromPEM(c.CABundle) {
		return "its caBundle has no certificate"
	}
	if c.Service == nil {
		return ""
	}
	name := c.Service.Namespace + "/" + c.Service.Name
	service, err := client.CoreV1().Services(c.Service.Namespace).Get(ctx, c.Service.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "the Service " + name + " does not exist"
	case err != nil, service.Spec.Type == corev1.ServiceTypeExternalName:
		return ""
	}
	slices, err := client.DiscoveryV1().EndpointSlices(c.Service.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + c.Service.Name,
	})
	if err != nil {
		return ""
	}
	for _, s := range slices.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				return ""
			}
		}
	}
	return "the Service " + name + " has no ready endpoint"
}

func readAPIServices(ctx context.Context, client kubernetes.Interface) (all []APIService, err error) {
	body, err := client.Discovery().RESTClient().Get().AbsPath("/apis/apiregistration.k8s.io/v1/apiservices").DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status, Reason, Message string }
			}
		}
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	for _, item := range list.Items {
		s := APIService{Name: item.Metadata.Name}
		for _, c := range item.Status.Conditions {
			if c.Type == "Available" && c.Status != "True" {
				s.Problem = strings.TrimSpace(c.Reason + ": " + c.Message)
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// unread returns a finding that the cluster's objects cannot be read.
func unread(in *Input) []Finding {
	return []Finding{fault(Skipped, "Fix the faults above, or use a kubeconfig whose user may list them.",
		"the objects cannot be read: %v", in.ClusterError)}
}

func webhooks(in *Input) (found []Finding) {
	if in.ClusterError != nil {
		return unread(in)
	}
	failing := map[string]string{}
	for _, r := range responding(in.Reports) {
		var st admission.State
		r.State("admission", &st)
		for _, f := range st.Failing {
			failing[f.Endpoint] = fmt.Sprintf("the last call of %s failed", label(r))
		}
	}
	for _, w := range in.Cluster.Webhooks {
		reason := w.Problem
		if reason == "" {
			reason = failing[w.Endpoint]
		}
		if reason == "" {
			continue
		}
		level, effect := Error, "requests that match it are rejected"
		if !w.Required {
			level, effect = Warning, "requests that match it wait for its timeout"
		}
		found = append(found, fault(level, "Start the webhook's server, or delete the configuration.",
			"%s (%s) does not respond: %s; %s", w.Name, w.Endpoint, reason, effect))
	}
	return found
}

func apiServices(in *Input) (found []Finding) {
	if in.ClusterError != nil {
		return unread(in)
	}
	for _, s := range in.Cluster.APIServices {
		if s.Problem != "" {
			found = append(found, fault(Error, "Start the APIService's server, or delete the APIService.",
				"the APIService %s is not available: %s", s.Name, s.Problem))
		}
	}
	return found
}
